// The gateway's events and answers, asked for with the key that was typed.

import { apply, emptyView, newest, type Decision, type View } from "./model";

export type Status = "connecting" | "live" | "lost" | "no-key" | "tenant";

export interface Shown {
  status: Status;
  why: string;
  view: View;
}

const KEY = "quire-key";
const POLL_MS = 3000;
/** A call of `/v1/models` has a line in the access log. */
const MODELS_MS = 60_000;
const MAX_PAUSE_MS = 10_000;
const MAX_EVENT_CHARS = 16_000_000;

export const key = {
  get: (): string => sessionStorage.getItem(KEY) ?? "",
  set: (value: string): void => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export function ask(path: string, options: RequestInit = {}): Promise<Response> {
  const headers = new Headers(options.headers);
  if (key.get()) headers.set("Authorization", `Bearer ${key.get()}`);
  return fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
}

/** The `[event, data]` pairs of a stream of server-sent events; data alone has an empty name. */
export async function* events(response: Response): AsyncGenerator<[string, string]> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      if (rest.length > MAX_EVENT_CHARS) throw new Error("the server sends an event without end");
      const parts = rest.split("\n\n");
      rest = parts.pop()!;
      for (const part of parts) {
        let name = "";
        let data = "";
        for (const line of part.split("\n")) {
          if (line.startsWith("event: ")) name = line.slice(7);
          else if (line.startsWith("data: ")) data += line.slice(6);
        }
        yield [name, data];
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

export async function errorOf(response: Response): Promise<string> {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

/** Follows the gateway until `stop` says otherwise, and shows each change with `show`. */
export async function follow(show: (shown: Shown) => void, stop: AbortSignal): Promise<void> {
  let view = emptyView();
  let pauseMs = 500;
  const say = (status: Status, why = ""): void => show({ status, why, view });
  say("connecting");
  while (!stop.aborted) {
    try {
      const response = await ask("ui/events", { signal: stop });
      if (response.status === 401) return say("no-key", key.get() ? "The gateway does not know this key." : "");
      if (response.status === 403) return await followOwn(show, stop);
      if (!response.ok) throw new Error(await errorOf(response));
      for await (const [name, data] of events(response)) {
        if (stop.aborted) return;
        const begin = performance.now();
        view = apply(view, name, JSON.parse(data));
        say("live");
        await measured(begin);
        pauseMs = 500;
      }
      throw new Error("the gateway ended the stream");
    } catch (error) {
      if (stop.aborted) return;
      say("lost", String(error instanceof Error ? error.message : error));
    }
    await pause(pauseMs, stop);
    pauseMs = Math.min(2 * pauseMs, MAX_PAUSE_MS);
  }
}

/** What a tenant's key lets see: the decisions on its own requests. */
async function followOwn(show: (shown: Shown) => void, stop: AbortSignal): Promise<void> {
  const view = emptyView();
  let modelsDueMs = 0;
  while (!stop.aborted) {
    try {
      view.decisions = newest(await own("limit=40"), [], (each) => `${each.id}/${each.attempt}`);
      if (performance.now() >= modelsDueMs) {
        const models = await (await ask("v1/models", { signal: stop })).json();
        const listed = models.data.map((each: { id: string; task: string | null }) => ({ name: each.id, task: each.task }));
        view.gateway = { name: "", num: 1, version: "", models: listed, viewers: 0, inflight: 0, num_groups: 0 };
        modelsDueMs = performance.now() + MODELS_MS;
      }
      show({ status: "tenant", why: "", view: { ...view } });
    } catch (error) {
      if (!stop.aborted) show({ status: "lost", why: String(error), view });
    }
    await pause(POLL_MS, stop);
  }
}

/** The decisions that `/v1/routing/decisions` tells of, which every key may ask. */
export async function own(query: string): Promise<Decision[]> {
  const response = await ask(`v1/routing/decisions?${query}`);
  if (!response.ok) throw new Error(await errorOf(response));
  const { data } = await response.json();
  return data.map((each: any) => ({
    id: each.request_id,
    client_id: each.client_id,
    tenant: each.tenant,
    attempt: each.attempt,
    at: each.decided_at_s,
    group: each.routing.group,
    reason: each.routing.reason,
    candidates: each.routing.candidates.length,
    tokens: each.num_prompt_tokens,
    expected: each.routing.predicted_cached_tokens,
    cached: each.num_cached_tokens ?? null,
    forecast: each.routing.forecast_s ?? null,
    waited: each.waited_s ?? null,
    outcome: each.outcome,
  }));
}

const costs: number[] = [];

/** Notes how long an event took from its arrival until the page is laid out again. */
async function measured(begin: number): Promise<void> {
  await Promise.resolve();
  void document.body.offsetHeight;
  costs.push(performance.now() - begin);
  if (costs.length > 500) costs.shift();
  const sorted = [...costs].sort((a, b) => a - b);
  const root = document.documentElement.dataset;
  root.updates = String(Number(root.updates ?? 0) + 1);
  root.updateP95Ms = sorted[Math.floor(0.95 * (sorted.length - 1))].toFixed(2);
}

function pause(ms: number, stop: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    stop.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
