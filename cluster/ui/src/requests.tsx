import { useState } from "preact/hooks";
import { clock, count, plural, seconds, short } from "./format";
import { Key } from "./legend";
import type { Call } from "./model";

const SHOWN = 12;

/** A part of a call, in seconds since it came. */
interface Span {
  begin: number;
  end: number;
  kind: "tokenize" | "queue" | "prefill" | "decode" | "lost";
  what: string;
}

export function Requests({ calls }: { calls: Call[] }) {
  const [chosen, setChosen] = useState(0);
  const rows = calls.filter((each, number) => number < SHOWN || each.number === chosen);
  const longest = Math.max(...rows.map((each) => each.total), 1e-9);
  return (
    <section class="requests" aria-labelledby="requests-title">
      <h2 id="requests-title">
        Requests that ended <small>the last {rows.length}</small>
        <span class="legend">
          <Key color="tokenize">template and tokenizer</Key>
          <Key color="queue">queue</Key>
          <Key color="prefill">until the first token</Key>
          <Key color="decode">tokens</Key>
          <Key color="lost">moved</Key>
        </span>
      </h2>
      {rows.length === 0 && <p class="empty">No request has ended yet. Send one with the chat.</p>}
      <ol>
        {rows.map((each) => {
          const spans = spansOf(each);
          const isChosen = each.number === chosen;
          return (
            <li key={each.number}>
              <button type="button" aria-expanded={isChosen} onClick={() => setChosen(isChosen ? 0 : each.number)}>
                <code>{short(each.id)}</code>
                <Waterfall spans={spans} scale={longest} />
                <span class="number">{seconds(each.total)}</span>
              </button>
              {isChosen && <Steps call={each} spans={spans} />}
            </li>
          );
        })}
      </ol>
    </section>
  );
}

function spansOf(call: Call): Span[] {
  const { prepared, attempts, total } = call;
  const sent = attempts.length > 0 ? attempts[0].sent : total;
  const spans: Span[] = [
    { begin: 0, end: prepared, kind: "tokenize", what: "chat template and tokenizer" },
    { begin: prepared, end: sent, kind: "queue", what: call.admitted === null ? "in the queue, not admitted" : "in the queue" },
  ];
  attempts.forEach((each, number) => {
    const end = each.end ?? total;
    const first = each.first ?? end;
    spans.push({ begin: each.sent, end: first, kind: "prefill", what: `${each.group}, until its first token` });
    if (end > first) spans.push({ begin: first, end, kind: "decode", what: `${each.group}, tokens` });
    const next = attempts[number + 1];
    if (!next) return;
    spans.push({ begin: end, end, kind: "lost", what: `${each.group}, moved: ${each.outcome}` });
    if (next.sent > end) spans.push({ begin: end, end: next.sent, kind: "queue", what: "until another group took it" });
  });
  return spans;
}

const told = (span: Span): string => `${span.what}${span.end > span.begin ? ` ${seconds(span.end - span.begin)}` : ""}`;

function Waterfall({ spans, scale }: { spans: Span[]; scale: number }) {
  return (
    <span class="waterfall" role="img" aria-label={spans.map(told).join("; ")}>
      {spans.map((each, number) => (
        <i
          key={number}
          class={each.kind}
          title={told(each)}
          style={{ left: `${(100 * each.begin) / scale}%`, width: `${(100 * (each.end - each.begin)) / scale}%` }}
        />
      ))}
    </span>
  );
}

function Steps({ call, spans }: { call: Call; spans: Span[] }) {
  const who = [call.id, call.client_id, call.tenant].filter(Boolean).join(" · ");
  const last = call.completions > 1 ? `, ${plural(call.completions, "completion")}, of which the last to end is shown` : "";
  return (
    <div class="steps">
      <p>
        {clock(call.at - call.total)} · <code>{who}</code> · {count(call.tokens)} tokens in, {count(call.cached)} of them cached,{" "}
        {count(call.output)} out{last} · {call.outcome}
      </p>
      <ol>
        {spans.map((each, number) => (
          <li key={number}>
            <span class="number">{seconds(each.begin)}</span> {each.what}
            {each.end > each.begin && `: ${seconds(each.end - each.begin)}`}
          </li>
        ))}
      </ol>
    </div>
  );
}
