// What the gateway sends, and how a change is applied to what is known.

export interface Group {
  group: string;
  model: string;
  address: string;
  state: "ready" | "draining" | "lost";
  why: string;
  ranks: number;
  tiers: number;
  block_size: number;
  max_running: number;
  running: number;
  waiting: number;
  prefill: number;
  held: number;
  cached: number;
  free: number;
  host: number;
  disk: number;
  peer: number;
  tps: number;
  hit: number | null;
}

export interface Decision {
  id: string;
  client_id: string;
  tenant: string;
  attempt: number;
  at: number;
  group: string;
  reason: string;
  candidates: number;
  tokens: number;
  expected: number;
  cached: number | null;
  forecast: number | null;
  waited: number | null;
  outcome: string;
}

/** A completion at one group. Times are in seconds since its call came. */
export interface Attempt {
  group: string;
  sent: number;
  first: number | null;
  end: number | null;
  outcome: string;
}

/** A call that ended, with the attempts of its completion that ended last. Times are as theirs. */
export interface Call {
  number: number;
  id: string;
  client_id: string;
  tenant: string;
  /** When it ended, since 1970. */
  at: number;
  prepared: number;
  admitted: number | null;
  total: number;
  completions: number;
  tokens: number;
  cached: number;
  output: number;
  outcome: string;
  attempts: Attempt[];
}

export interface Prefix {
  name: string;
  parent: string | null;
  model: string;
  tokens: number;
  hits: number;
  holders: string[];
}

export interface Model {
  name: string;
  /** What it is for: "generate", "embed", "score"; nothing until that is known. */
  task: string | null;
}

/** Whether one may chat with it; also while that is not known. */
export const generates = (model: Model): boolean => !model.task || model.task === "generate";

export interface Gateway {
  name: string;
  num: number;
  version: string;
  models: Model[];
  viewers: number;
  inflight: number;
  num_groups: number;
}

/** [time, TTFT p50, TTFT p99, TPOT p50, TPOT p99, tokens/s, hit rate, queued, running] */
export type Point = (number | null)[];

export interface View {
  gateway: Gateway | null;
  groups: Map<string, Group>;
  calls: Call[];
  decisions: Decision[];
  prefixes: Prefix[];
  series: Point[];
}

interface Event {
  gateway?: Gateway;
  point?: Point | null;
  groups: Record<string, Group>;
  gone?: string[];
  calls: Call[];
  decisions: Decision[];
  prefixes?: Prefix[];
  series?: Point[];
}

const NUM_POINTS = 300;
const NUM_ROWS = 200;

export const emptyView = (): View => ({
  gateway: null,
  groups: new Map(),
  calls: [],
  decisions: [],
  prefixes: [],
  series: [],
});

export function apply(view: View, name: string, event: Event): View {
  const whole = name === "picture";
  const groups = whole ? new Map<string, Group>() : new Map(view.groups);
  for (const key of event.gone ?? []) groups.delete(key);
  for (const [key, row] of Object.entries(event.groups)) groups.set(key, row);
  const series = event.series ?? view.series;
  const last = series[series.length - 1]?.[0] ?? 0;
  const isNew = event.point && (event.point[0] ?? 0) > (last ?? 0);
  return {
    gateway: event.gateway ?? view.gateway,
    groups,
    calls: newest(event.calls, whole ? [] : view.calls, (each) => String(each.number)),
    decisions: newest(event.decisions, whole ? [] : view.decisions, (each) => `${each.id}/${each.attempt}`),
    prefixes: event.prefixes ?? view.prefixes,
    series: isNew ? [...series, event.point!].slice(-NUM_POINTS) : series,
  };
}

/** The rows of both, a newer one in place of an older one of the same key, the last first. */
export function newest<T extends { at: number }>(news: T[], old: T[], key: (row: T) => string): T[] {
  const rows = new Map(old.map((row) => [key(row), row]));
  for (const row of news) rows.set(key(row), row);
  return [...rows.values()].sort((a, b) => b.at - a.at).slice(0, NUM_ROWS);
}
