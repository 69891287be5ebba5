"""OpenAI Realtime over WebSocket, in text, and its ephemeral keys over HTTP.

`schema.py` reads what clients send, `events.py` turns a run into the protocol's events, `default.py` is the conversation that a session
speaks in, `socket.py` the order of a connection, `http.py` the routes.

The conversation is one of `/v1/conversations`: it is there from its first item or response on, and any other protocol can continue it.
Its id is the session's `conversation_id` (an extension) from the first event on, and each response's. Other extensions:
`?conversation=conv_...` continues a conversation, the sampling fields (`temperature`, `seed`, `stop`, ...) may stand in a session and in
`response.create`, and `text_end` in `conversation.item.truncate` says how many characters of a reply were heard.

Clients that were made for speech send `audio` settings whatever they do: they are taken and mean nothing, since there is no audio; audio
itself, and asking for it in a reply, is refused.
(OpenAI API reference: Realtime, client and server events)
"""
