// Responses over HTTP.

import { APIUserAbortError } from 'openai';
import { GREEDY, all, client, failure, model, run, tell } from './lib.mjs';

const asking = { ...GREEDY, max_output_tokens: 24 };
const endless = { model, input: 'Write a very long story.', max_output_tokens: 4000, ignore_eos: true };
const QUESTIONS = ['What is the capital of France?', 'And of Italy?'];

await run({
  async create() {
    let previous_response_id;
    for (const input of QUESTIONS) {
      const response = await client.responses.create({ ...asking, input, previous_response_id });
      const found = await client.responses.retrieve(response.id);
      tell({ response, found, text: response.output_text, requestID: response._request_id });
      previous_response_id = response.id;
    }
    const items = await all(client.responses.inputItems.list(previous_response_id));
    tell({ items });
  },

  async stream() {
    let previous_response_id;
    for (const input of QUESTIONS) {
      const helper = client.responses.stream({ ...asking, input, previous_response_id });
      let deltas = '';
      let snapshot = '';
      helper.on('response.output_text.delta', (event) => {
        deltas += event.delta;
        snapshot = event.snapshot;
      });
      const events = await all(helper);
      const response = await helper.finalResponse();
      tell({ types: events.map((event) => event.type), numbers: events.map((event) => event.sequence_number), deltas, snapshot, response });
      previous_response_id = response.id;
    }
  },

  // A stream is left in its middle and taken up again by the helper.
  async resume() {
    const stream = await client.responses.create({ ...asking, input: QUESTIONS[0], background: true, stream: true });
    let id;
    let deltas = '';
    let last;
    for await (const event of stream) {
      if (event.type === 'response.created') id = event.response.id;
      if (event.type === 'response.output_text.delta') deltas += event.delta;
      last = event.sequence_number;
      if (last === 5) break;
    }
    const helper = client.responses.stream({ response_id: id, starting_after: last });
    const events = await all(helper, (event) => {
      if (event.type === 'response.output_text.delta') deltas += event.delta;
    });
    tell({ last, numbers: events.map((event) => event.sequence_number), deltas, text: (await helper.finalResponse()).output_text });
  },

  async cancel() {
    const begun = await client.responses.create({ ...endless, background: true });
    const cancelled = await client.responses.cancel(begun.id);
    let found = cancelled;
    while (found.status === 'in_progress') found = await client.responses.retrieve(begun.id);
    tell({ begun: begun.status, ended: found.status, incomplete_details: found.incomplete_details });
  },

  async abort() {
    const helper = client.responses.stream(endless);
    helper.on('response.output_text.delta', () => helper.abort());
    try {
      await helper.finalResponse();
    } catch (error) {
      tell({ aborted: error instanceof APIUserAbortError });
    }
  },

  async call() {
    const tools = [{
      type: 'function',
      name: 'weather',
      parameters: { type: 'object', properties: { city: { type: 'string', enum: ['Paris', 'Rome'] } }, required: ['city'], additionalProperties: false },
      strict: true,
    }];
    const asked = { ...asking, tools, max_output_tokens: 60, parallel_tool_calls: false };
    const helper = client.responses.stream({ ...asked, input: 'How is the weather in Paris?', tool_choice: 'required' });
    let deltas = '';
    helper.on('response.function_call_arguments.delta', (event) => {
      deltas += event.delta;
    });
    const first = await helper.finalResponse();
    const [call] = first.output;
    const output = [{ type: 'function_call_output', call_id: call.call_id, output: '21 degrees' }];
    const second = await client.responses.create({ ...asked, input: output, previous_response_id: first.id, tool_choice: 'none' });
    tell({ call, deltas, second });
  },

  async conversation() {
    const { id } = await client.conversations.create({ metadata: { topic: 'capitals' } });
    for (const input of QUESTIONS) await client.responses.create({ ...asking, input, conversation: id });
    const items = await all(client.conversations.items.list(id, { order: 'asc', limit: 1 }));
    tell({ id, roles: items.map((item) => item.role), metadata: (await client.conversations.retrieve(id)).metadata });
    tell(await client.conversations.delete(id));
    tell(await failure(client.conversations.retrieve(id)));
  },

  async errors() {
    tell(await failure(client.responses.create({ ...asking, input: 'Hi', temperature: 9 })));
    tell(await failure(client.responses.create({ ...asking, input: 'Hi', previous_response_id: 'resp_none' })));
    tell(await failure(client.responses.stream({ ...asking, input: 'Hi', temperature: 9 }).finalResponse()));
    tell(await failure(client.responses.retrieve('resp_none')));
    tell(await failure(client.responses.create({ ...asking, model: 'another', input: 'Hi' })));
  },

  async refused() {
    tell(await failure(client.withOptions({ apiKey: 'wrong' }).responses.create({ ...asking, input: 'Hi' })));
    const response = await client.responses.create({ ...asking, input: 'Hi', max_output_tokens: 1 });
    tell({ status: response.status });
  },
});
