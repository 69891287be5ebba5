// What every script here shares: the client that its environment describes, and how it tells the test that started it what it saw.
// A script is started with the name of one of its cases; it prints a line of JSON for each thing seen, and judges nothing itself.

import OpenAI, { APIError } from 'openai';

export const model = process.env.HOCKET_MODEL;
export const baseURL = `${process.env.HOCKET_URL}/v1`;
export const client = new OpenAI({ baseURL, apiKey: process.env.HOCKET_KEY, maxRetries: 0 });
export const GREEDY = { model, temperature: 0 };

export function tell(seen) {
  process.stdout.write(`${JSON.stringify(seen)}\n`);
}

// Runs the case that was asked for.
export async function run(cases) {
  const [, , name] = process.argv;
  if (!(name in cases)) throw new Error(`expected one of ${Object.keys(cases)}, got ${name}`);
  await cases[name]();
}

// How a call fails, as someone who catches it sees it.
export async function failure(promise) {
  try {
    await promise;
  } catch (error) {
    if (!(error instanceof APIError)) throw error;
    const { status, code, param, type, requestID } = error;
    return { class: error.constructor.name, status, code, param, type, requestID };
  }
  throw new Error('expected an error, got none');
}

// The events of a stream as they come, each looked at by `see`.
export async function all(stream, see = () => {}) {
  const events = [];
  for await (const event of stream) {
    events.push(event);
    await see(event);
  }
  return events;
}
