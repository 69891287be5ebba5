"""OpenAI Responses, over WebSocket (the primary protocol: the page speaks it) and over HTTP.

`schema.py` reads requests, `events.py` turns a run into the protocol's events, `socket.py` and `http.py` carry both.
(OpenAI API reference: Responses, Responses over WebSocket)
"""
