// Realtime, by the class that HOCKET_SOCKET names: `ws` (the package's WebSocket, a key in a header) or `websocket` (the platform's own, as in
// a browser, a key among the subprotocols). Both ask for TLS.

import { baseURL, client, model, run, tell } from './lib.mjs';

const { OpenAIRealtimeWS, OpenAIRealtimeWebSocket } = await import(`openai/realtime/${process.env.HOCKET_SOCKET}`);
const Socket = OpenAIRealtimeWS ?? OpenAIRealtimeWebSocket;
const short = { max_output_tokens: 16, temperature: 0 };

// A session whose events are read one by one.
async function open(from = client) {
  const socket = new Socket({ model }, from);
  const events = [];
  let arrived = () => {};
  const heard = (event) => {
    events.push(event);
    arrived();
  };
  socket.on('event', heard);
  socket.on('error', (error) => {
    // Those of the server come as events too.
    if (!error.error) heard({ type: 'failure', message: error.message });
  });
  const session = {
    socket,
    async until(...types) {
      const passed = [];
      for (;;) {
        while (!events.length) await new Promise((resolve) => (arrived = resolve));
        passed.push(events.shift());
        if ([...types, 'error', 'failure'].includes(passed.at(-1).type)) return passed;
      }
    },
    say(text) {
      const item = { type: 'message', role: 'user', content: [{ type: 'input_text', text }] };
      socket.send({ type: 'conversation.item.create', item });
    },
  };
  return { ...session, opening: (await session.until('session.created')).at(-1) };
}

await run({
  async turns() {
    const { socket, opening, say, until } = await open();
    tell(opening);
    socket.send({ type: 'session.update', session: { type: 'realtime', instructions: 'You answer in one sentence.', output_modalities: ['text'] } });
    tell((await until('session.updated')).at(-1));
    for (const text of ['What is the capital of France?', 'And of Italy?']) {
      say(text);
      socket.send({ type: 'response.create', response: short });
      tell(await until('response.done'));
    }
    socket.close();
  },

  async out_of_band() {
    const { socket, say, until } = await open();
    say('What is the capital of France?');
    socket.send({ type: 'response.create', response: short });
    const asked = (await until('response.done')).at(-1).response;
    const input = [{ type: 'message', role: 'user', content: [{ type: 'input_text', text: 'Say hello.' }] }];
    socket.send({ type: 'response.create', response: { ...short, conversation: 'none', metadata: { topic: 'aside' }, input } });
    const aside = await until('response.done');
    socket.send({ type: 'conversation.item.retrieve', item_id: aside.at(-1).response.output[0].id });
    tell({ asked, aside, unknown: (await until('conversation.item.retrieved')).at(-1) });
    socket.close();
  },

  async cancel() {
    const { socket, say, until } = await open();
    say('Write a very long story.');
    socket.send({ type: 'response.create', response: { max_output_tokens: 4000, ignore_eos: true } });
    await until('response.output_text.delta');
    socket.send({ type: 'response.cancel' });
    tell((await until('response.done')).at(-1));
    socket.send({ type: 'response.cancel', event_id: 'mine' });
    tell((await until('response.done')).at(-1));
    say('Hello');
    socket.send({ type: 'response.create', response: short });
    tell((await until('response.done')).at(-1));
    socket.close();
  },

  // A browser gets a key that lives for minutes from someone who has a lasting one.
  async ephemeral() {
    const secret = await client.realtime.clientSecrets.create({ session: { type: 'realtime', instructions: 'You are a pirate.' } });
    const { socket, opening } = await open({ apiKey: secret.value, baseURL });
    tell({ secret: { ...secret, value: secret.value.slice(0, 3) }, opening });
    socket.close();
  },

  async refused() {
    tell((await open({ apiKey: 'wrong', baseURL, _options: {} })).opening);
  },
});
