// Responses over WebSocket, by the package `ws`.

import { ResponsesWS } from 'openai/resources/responses/ws';
import { GREEDY, client, model, run, tell } from './lib.mjs';

const asking = { type: 'response.create', ...GREEDY, max_output_tokens: 24 };
const QUESTIONS = ['What is the capital of France?', 'And of Italy?'];
const ENDS = ['response.completed', 'response.incomplete', 'response.failed'];

// A connection whose events are read one by one; an event that is an error is one too.
function connect(options) {
  const ws = new ResponsesWS(client, options);
  const records = ws.stream();
  return {
    ws,
    async next() {
      for (;;) {
        const { value, done } = await records.next();
        if (done) throw new Error('the connection has ended');
        if (value.type === 'message') return value.message;
        if (value.type === 'error') return { type: 'error', sdk: value.error.message, class: value.error.constructor.name, ...value.error.error };
        if (value.type === 'close') return { type: 'close', code: value.code };
      }
    },
    async until(...types) {
      const events = [];
      do events.push(await this.next());
      while (!types.includes(events.at(-1).type) && events.at(-1).type !== 'error');
      return events;
    },
  };
}

const text = (events) => events.map((event) => (event.type === 'response.output_text.delta' ? event.delta : '')).join('');

await run({
  async turns() {
    const connection = connect();
    let previous_response_id;
    for (const input of QUESTIONS) {
      connection.ws.send({ ...asking, input, previous_response_id });
      const events = await connection.until(...ENDS);
      const { response } = events.at(-1);
      tell({ types: events.map((event) => event.type), numbers: events.map((event) => event.sequence_number), text: text(events), response });
      previous_response_id = response.id;
    }
    connection.ws.close();
    tell(await connection.until('close'));
  },

  async lanes() {
    const connection = connect();
    const lanes = { left: [], right: [] };
    for (const stream_id of Object.keys(lanes)) connection.ws.send({ ...asking, stream_id, input: QUESTIONS[0], max_output_tokens: 12 });
    for (let ended = 0; ended < 2; ) {
      const event = await connection.next();
      lanes[event.stream_id].push(event);
      if (ENDS.includes(event.type)) ended += 1;
    }
    for (const [lane, events] of Object.entries(lanes)) tell({ lane, text: text(events), numbers: events.map((event) => event.sequence_number) });
    connection.ws.close();
  },

  async warm_up() {
    const connection = connect();
    connection.ws.send({ ...asking, input: QUESTIONS[0], generate: false });
    const warm = (await connection.until(...ENDS)).at(-1).response;
    connection.ws.send({ ...asking, input: QUESTIONS[1], previous_response_id: warm.id });
    const { response } = (await connection.until(...ENDS)).at(-1);
    tell({ warm, response });
    connection.ws.close();
  },

  async cancel() {
    const connection = connect();
    connection.ws.send({ type: 'response.create', model, input: 'Write a very long story.', max_output_tokens: 4000, ignore_eos: true });
    const response_id = (await connection.until('response.output_text.delta'))[0].response.id;
    connection.ws.send({ type: 'response.cancel', response_id });
    tell((await connection.until(...ENDS)).at(-1));
    connection.ws.close();
  },

  async errors() {
    const connection = connect();
    connection.ws.send({ ...asking, input: 'Hi', previous_response_id: 'resp_none' });
    tell(await connection.next());
    connection.ws.send({ ...asking, input: 'Hi', max_output_tokens: 1 });
    tell((await connection.until(...ENDS)).at(-1));
    connection.ws.close();
  },

  // The server wants a key and gets another one.
  async refused() {
    const connection = connect({ headers: { Authorization: 'Bearer wrong' } });
    tell(await connection.next());
  },
});
