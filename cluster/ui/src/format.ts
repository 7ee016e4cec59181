// Numbers with their units, as short as they can be read.

export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1e3)} ms`;
  return value < 100 ? `${value.toFixed(1)} s` : `${Math.round(value)} s`;
}

export function count(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (value < 10000) return Number.isInteger(value) ? String(value) : value.toFixed(value < 10 ? 1 : 0);
  if (value < 1e6) return `${(value / 1e3).toFixed(value < 1e5 ? 1 : 0)} k`;
  return value < 1e9 ? `${(value / 1e6).toFixed(1)} M` : `${(value / 1e9).toFixed(1)} G`;
}

export function percent(value: number | null | undefined): string {
  return value === null || value === undefined ? "–" : `${Math.round(value * 100)} %`;
}

export const clock = (at: number): string => new Date(at * 1000).toLocaleTimeString("en-GB");

export const short = (id: string): string => (id.length > 10 ? `${id.slice(0, 8)}…` : id);

export const plural = (number: number, name: string): string =>
  `${count(number)} ${name}${number === 1 ? "" : "s"}`;
