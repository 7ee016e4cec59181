// OpenAI's client: `node openai.mjs CASE BASE_URL` prints what the case got, as JSON.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [name, baseURL] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const asked = [{ role: "user", content: "?" }];
const chat = { model: "hash", messages: asked };
const response = { model: "hash", input: asked };
const Animal = z.object({ kind: z.enum(["cat", "hen"]), legs: z.union([z.literal(2), z.literal(4)]) });
const cities = [];
const weather = ({ city }) => (cities.push(city), "rain");
const City = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};

async function runTools(options) {
  const runner = client.chat.completions.runTools({
    ...chat,
    ...options,
    tools: [
      {
        type: "function",
        function: { name: "weather", parameters: City, parse: JSON.parse, function: weather },
      },
    ],
  });
  return { text: await runner.finalContent(), cities };
}

async function refusal(call) {
  try {
    await call;
  } catch (error) {
    return { error: error.constructor.name, status: error.status, message: error.message };
  }
}

const cases = {
  async chat() {
    const answer = await client.chat.completions.create(chat);
    const { message, finish_reason } = answer.choices[0];
    return { text: message.content, finish_reason, usage: answer.usage };
  },
  async "chat stream"() {
    const options = { stream: true, stream_options: { include_usage: true } };
    const chunks = [];
    for await (const chunk of await client.chat.completions.create({ ...chat, ...options }))
      chunks.push(chunk);
    const choices = chunks.flatMap((chunk) => chunk.choices);
    return {
      text: choices.map((choice) => choice.delta.content ?? "").join(""),
      finish_reason: choices.at(-1).finish_reason,
      usage: chunks.at(-1).usage,
    };
  },
  "chat tools": () => runTools({}),
  "chat tools stream": () => runTools({ stream: true }),
  async "chat parse"() {
    const response_format = zodResponseFormat(Animal, "animal");
    const answer = await client.chat.completions.parse({ ...chat, response_format });
    return answer.choices[0].message.parsed;
  },
  "chat refused": () => refusal(client.chat.completions.create({ ...chat, model: "other" })),
  async response() {
    const answer = await client.responses.create(response);
    return { text: answer.output_text, status: answer.status, usage: answer.usage };
  },
  async "response stream"() {
    const events = [];
    for await (const event of await client.responses.create({ ...response, stream: true }))
      events.push(event);
    const deltas = events.filter((event) => event.type === "response.output_text.delta");
    const last = events.at(-1);
    return {
      text: deltas.map((event) => event.delta).join(""),
      status: last.type === "response.completed" && last.response.status,
      usage: last.response.usage,
    };
  },
  async "response tools"() {
    const tools = [{ type: "function", name: "weather", parameters: City, strict: true }];
    const first = await client.responses.stream({ ...response, tools }).finalResponse();
    const outputs = first.output.map((item) => ({
      type: "function_call_output",
      call_id: item.call_id,
      output: weather(JSON.parse(item.arguments)),
    }));
    const input = [...asked, ...first.output, ...outputs];
    const second = await client.responses.create({ ...response, input, tools });
    return { text: second.output_text, cities };
  },
  async "response parse"() {
    const text = { format: zodTextFormat(Animal, "animal") };
    return (await client.responses.parse({ ...response, text })).output_parsed;
  },
  "response refused": () => refusal(client.responses.create({ ...response, model: "other" })),
};

console.log(JSON.stringify(await cases[name]()));
