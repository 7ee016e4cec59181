// Vercel's AI SDK: `node ai.mjs CASE PROVIDER BASE_URL` prints what the case got, as JSON.
import { isDeepStrictEqual } from "node:util";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false; // They would stand on stdout.
const [name, provider, baseURL] = process.argv.slice(2);
const compatible = (options) =>
  createOpenAICompatible({ name: "quire", baseURL, ...options })("hash");
const openai = createOpenAI({ baseURL, apiKey: "none" });
const unstored = { providerOptions: { openai: { store: false } } };
const model = {
  compatible: () => compatible({ includeUsage: true }),
  "compatible with schemas": () => compatible({ supportsStructuredOutputs: true }),
  openai: () => openai("hash"), // Over responses.
  "openai chat": () => openai.chat("hash"),
}[provider]();
const asked = { model, system: "the cat", prompt: "?", maxRetries: 0 };
const schema = z.object({ kind: z.enum(["cat", "hen"]), legs: z.number().int() });
const cities = [];
const weather = ai.tool({
  description: "The weather there.",
  inputSchema: z.object({ city: z.string() }),
  execute: ({ city }) => (cities.push(city), "rain"),
});
const tooled = { ...asked, tools: { weather }, stopWhen: ai.stepCountIs(3) };
const fails = { onError: ({ error }) => { throw error; } };

async function told(result) {
  const { inputTokens, outputTokens } = await result.totalUsage;
  return {
    text: await result.text,
    reasoning: (await result.reasoningText) ?? null,
    finishReason: await result.finishReason,
    usage: [inputTokens, outputTokens],
    cities,
  };
}

async function streamed(result) {
  const deltas = [];
  for await (const delta of result.textStream) deltas.push(delta);
  return { ...(await told(result)), text: deltas.join("") };
}

async function turns(options) {
  const messages = [{ role: "user", content: "?" }];
  const turn = { ...asked, ...options, prompt: undefined, messages };
  messages.push(...(await ai.generateText(turn)).response.messages, messages[0]);
  return told(await ai.generateText(turn));
}

const cases = {
  text: async () => told(await ai.generateText(asked)),
  "text stream": () => streamed(ai.streamText({ ...asked, ...fails })),
  tools: async () => told(await ai.generateText(tooled)),
  "tools stream": () => streamed(ai.streamText({ ...tooled, ...fails })),
  object: async () => (await ai.generateObject({ ...asked, schema })).object,
  async "object stream"() {
    const result = ai.streamObject({ ...asked, schema, ...fails });
    let last;
    for await (const partial of result.partialObjectStream) last = partial;
    return isDeepStrictEqual(last, await result.object) && last;
  },
  output: async () =>
    (await ai.generateText({ ...tooled, output: ai.Output.object({ schema }) })).output,
  turns: () => turns({}),
  "turns unstored": () => turns(unstored),
  "turns refused": () => turns({}).catch(({ statusCode, message }) => ({ statusCode, message })),
  "tools unstored": async () => told(await ai.generateText({ ...tooled, ...unstored })),
};

console.log(JSON.stringify(await cases[name]()));
