// The Vercel AI SDK. Started with one of PROVIDERS and one of CASES; prints a line of JSON for each turn, and judges nothing.

import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { isStepCount, streamText, tool } from 'ai';
import { z } from 'zod';

const { HOCKET_URL, HOCKET_MODEL } = process.env;
const where = { baseURL: `${HOCKET_URL}/v1`, apiKey: 'unused' };
const PROVIDERS = {
  responses: () => createOpenAI(where)(HOCKET_MODEL), // its default
  chat: () => createOpenAI(where).chat(HOCKET_MODEL),
  compatible: () => createOpenAICompatible({ ...where, name: 'hocket', includeUsage: true })(HOCKET_MODEL),
};

async function turn(messages, settings) {
  const faults = [];
  const onError = ({ error }) => faults.push(String(error));
  const result = streamText({ model: PROVIDERS[process.argv[2]](), temperature: 0, maxOutputTokens: 24, onError, ...settings, messages });
  const pieces = [];
  for await (const piece of result.textStream) pieces.push(piece);
  const steps = await result.steps;
  messages.push(...steps.flatMap((step) => step.response.messages));
  process.stdout.write(`${JSON.stringify({
    pieces,
    text: await result.text,
    cached: (await result.usage).inputTokenDetails.cacheReadTokens,
    calls: steps.flatMap((step) => step.toolCalls.map((call) => ({ name: call.toolName, arguments: call.input }))),
    results: steps.flatMap((step) => step.toolResults.map((made) => made.output)),
    warnings: steps.flatMap((step) => step.warnings ?? []),
    faults,
  })}\n`);
}

const CASES = {
  async turns() {
    const messages = [];
    for (const content of ['What is the capital of France?', 'And of Italy?']) {
      messages.push({ role: 'user', content });
      await turn(messages, {});
    }
  },

  async tool() {
    const weather = tool({
      description: 'The weather of a city',
      inputSchema: z.object({ city: z.enum(['Paris', 'Rome']) }),
      execute: async ({ city }) => `21 degrees in ${city}`,
    });
    const messages = [{ role: 'user', content: 'How is the weather in Paris?' }];
    const providerOptions = { openai: { parallelToolCalls: false }, hocket: { parallel_tool_calls: false } };
    const settings = { tools: { weather }, maxOutputTokens: 80, stopWhen: isStepCount(1), providerOptions };
    await turn(messages, { ...settings, toolChoice: 'required' });
    await turn(messages, { ...settings, toolChoice: 'none' });
  },
};

await CASES[process.argv[3]]();
