import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { count, percent, seconds } from "./format";
import type { Point } from "./model";

interface Line {
  /** Where its values are in a point. */
  at: number;
  label: string;
  color: string;
}

interface Strip {
  title: string;
  lines: Line[];
  show: (value: number | null | undefined) => string;
  /** The least upper end of the scale. */
  least: number;
}

const STRIPS: Strip[] = [
  {
    title: "Time to first token",
    lines: [
      { at: 1, label: "p50", color: "--line-1" },
      { at: 2, label: "p99", color: "--line-2" },
    ],
    show: seconds,
    least: 0.01,
  },
  {
    title: "Time per output token",
    lines: [
      { at: 3, label: "p50", color: "--line-1" },
      { at: 4, label: "p99", color: "--line-2" },
    ],
    show: seconds,
    least: 0.01,
  },
  { title: "Output", lines: [{ at: 5, label: "tokens/s", color: "--line-1" }], show: count, least: 10 },
  { title: "Prompt tokens from cache", lines: [{ at: 6, label: "hit rate", color: "--line-1" }], show: percent, least: 1 },
  {
    title: "Requests",
    lines: [
      { at: 8, label: "running", color: "--line-1" },
      { at: 7, label: "queued", color: "--line-2" },
    ],
    show: count,
    least: 4,
  },
];

export function Charts({ series }: { series: Point[] }) {
  return (
    <section class="charts" aria-label="The last five minutes">
      {STRIPS.map((strip) => (
        <Chart key={strip.title} strip={strip} series={series} />
      ))}
    </section>
  );
}

function Chart({ strip, series }: { strip: Strip; series: Point[] }) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const scheme = useScheme();
  const last = series[series.length - 1];
  useLayoutEffect(() => {
    const made = new uPlot(optionsOf(strip, place.current!), dataOf(strip, series), place.current!);
    plot.current = made;
    const resized = new ResizeObserver(() => made.setSize(sizeOf(place.current!)));
    resized.observe(place.current!);
    return () => {
      resized.disconnect();
      made.destroy();
    };
  }, [scheme]);
  useLayoutEffect(() => plot.current?.setData(dataOf(strip, series)), [series]);
  return (
    <figure>
      <figcaption>
        <span>{strip.title}</span>
        <span class="values">
          {strip.lines.map((line) => (
            <span key={line.label}>
              <i class={line.color.slice(2)} /> {line.label} <b>{strip.show(last?.[line.at])}</b>
            </span>
          ))}
        </span>
      </figcaption>
      <div class="plot" ref={place} aria-hidden="true" />
    </figure>
  );
}

function useScheme(): boolean {
  const query = matchMedia("(prefers-color-scheme: dark)");
  const [isDark, setIsDark] = useState(query.matches);
  useEffect(() => {
    const changed = () => setIsDark(query.matches);
    query.addEventListener("change", changed);
    return () => query.removeEventListener("change", changed);
  }, []);
  return isDark;
}

const sizeOf = (place: HTMLElement) => ({ width: Math.max(120, place.clientWidth), height: 104 });

function dataOf(strip: Strip, series: Point[]): uPlot.AlignedData {
  const columns = [0, ...strip.lines.map((line) => line.at)];
  return columns.map((at) => series.map((point) => point[at] ?? null)) as uPlot.AlignedData;
}

function optionsOf(strip: Strip, place: HTMLElement): uPlot.Options {
  const style = getComputedStyle(document.documentElement);
  const color = (name: string) => style.getPropertyValue(name).trim();
  const axis = {
    stroke: color("--faint"),
    font: "11px system-ui, sans-serif",
    ticks: { show: false },
    grid: { stroke: color("--rule"), width: 1 },
  };
  return {
    ...sizeOf(place),
    legend: { show: false },
    cursor: { show: false },
    padding: [6, 8, 0, 0],
    scales: {
      x: { range: (_, __, max) => [(max || Date.now() / 1000) - 300, max || Date.now() / 1000] },
      y: { range: (_, __, max) => [0, Math.max(strip.least, 1.1 * (max || 0))].map((each) => strip.least === 1 ? Math.min(each, 1) : each) as [number, number] },
    },
    axes: [
      {
        ...axis,
        grid: { show: false },
        size: 18,
        splits: (u, __, min, max) => (u.width < 300 ? [2, 4] : [1, 2, 3, 4]).map((minute) => max - 60 * minute).filter((at) => at >= min).reverse(),
        values: (u, at) => at.map((each) => `−${Math.round((u.scales.x.max! - each) / 60)} min`),
      },
      { ...axis, size: 48, space: 32, values: (_, at) => at.map((each) => strip.show(each)) },
    ],
    series: [
      {},
      ...strip.lines.map((line) => ({
        stroke: color(line.color),
        width: 1.5,
        points: { show: false },
      })),
    ],
  };
}
