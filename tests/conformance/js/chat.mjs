// Chat completions.

import { APIUserAbortError } from 'openai';
import { GREEDY, all, client, failure, model, run, tell } from './lib.mjs';

const asking = { ...GREEDY, max_tokens: 24 };
const QUESTIONS = ['What is the capital of France?', 'And of Italy?'];
const parameters = { type: 'object', properties: { city: { type: 'string', enum: ['Paris', 'Rome'] } }, required: ['city'], additionalProperties: false };
const weather = { type: 'function', function: { name: 'weather', description: 'The weather of a city', parameters, strict: true } };

await run({
  async create() {
    const messages = [];
    for (const content of QUESTIONS) {
      messages.push({ role: 'user', content });
      const completion = await client.chat.completions.create({ ...asking, messages });
      tell({ completion, requestID: completion._request_id });
      messages.push(completion.choices[0].message);
    }
  },

  // The helper, which puts the whole together by itself.
  async stream() {
    const messages = [];
    for (const content of QUESTIONS) {
      messages.push({ role: 'user', content });
      const helper = client.chat.completions.stream({ ...asking, messages, stream_options: { include_usage: true } });
      let deltas = '';
      helper.on('content', (delta) => {
        deltas += delta;
      });
      const chunks = await all(helper);
      const completion = await helper.finalChatCompletion();
      tell({ deltas, content: await helper.finalContent(), usage: await helper.totalUsage(), completion, last: chunks.at(-1) });
      messages.push(await helper.finalMessage());
    }
  },

  async usage_unasked() {
    const messages = [{ role: 'user', content: QUESTIONS[0] }];
    tell(await all(await client.chat.completions.create({ ...asking, messages, stream: true })));
  },

  async tools() {
    const messages = [{ role: 'user', content: 'How is the weather in Paris?' }];
    const asked = { ...asking, max_tokens: 60, tools: [weather], parallel_tool_calls: false };
    const helper = client.chat.completions.stream({ ...asked, messages, tool_choice: 'required' });
    let deltas = '';
    helper.on('tool_calls.function.arguments.delta', (event) => {
      deltas += event.arguments_delta;
    });
    const { message, finish_reason } = (await helper.finalChatCompletion()).choices[0];
    messages.push(message, { role: 'tool', tool_call_id: message.tool_calls[0].id, content: '21 degrees' });
    const answer = await client.chat.completions.create({ ...asked, messages, tool_choice: 'none' });
    tell({ message, finish_reason, deltas, answer: answer.choices[0] });
  },

  // The SDK calls the function itself; by name it does so once.
  async run_tools() {
    const called = [];
    const tool = { ...weather, function: { ...weather.function, parse: JSON.parse, function: (given) => called.push(given) && '21 degrees' } };
    const tool_choice = { type: 'function', function: { name: 'weather' } };
    for (const stream of [false, true]) {
      const messages = [{ role: 'user', content: 'How is the weather in Rome?' }];
      const asked = { ...asking, max_tokens: 60, tools: [tool], tool_choice, parallel_tool_calls: false };
      const runner = client.chat.completions.runTools({ ...asked, messages, stream });
      await runner.done();
      tell({ called: called.pop(), call: await runner.finalFunctionToolCall(), result: await runner.finalFunctionToolCallResult() });
    }
  },

  async abort() {
    const messages = [{ role: 'user', content: 'Write a very long story.' }];
    const helper = client.chat.completions.stream({ model, messages, max_tokens: 4000, ignore_eos: true });
    helper.on('content', () => helper.abort());
    try {
      await helper.finalContent();
    } catch (error) {
      tell({ aborted: error instanceof APIUserAbortError });
    }
  },

  async errors() {
    const messages = [{ role: 'user', content: 'Hi' }];
    tell(await failure(client.chat.completions.create({ ...asking, messages, temperature: 9 })));
    tell(await failure(client.chat.completions.stream({ ...asking, messages, temperature: 9 }).finalContent()));
    tell(await failure(client.chat.completions.create({ ...asking, messages: [] })));
    tell(await failure(client.chat.completions.create({ ...asking, messages, model: 'another' })));
  },

  async models() {
    tell((await all(client.models.list())).map((each) => each.id));
    const completion = await client.completions.create({ ...asking, prompt: 'Once upon a time' });
    const stream = await client.completions.create({ ...asking, prompt: 'Once upon a time', stream: true });
    const parts = await all(stream);
    tell({ text: completion.choices[0].text, streamed: parts.map((part) => part.choices[0]?.text ?? '').join('') });
  },
});
