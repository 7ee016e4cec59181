import { useState } from "preact/hooks";
import { clock, count, seconds, short } from "./format";
import { Key } from "./legend";
import type { Decision } from "./model";

const SHOWN = 12;

interface Span {
  begin: number;
  end: number;
  kind: "queue" | "prefill" | "decode" | "lost";
  what: string;
}

/** A request that ended: its attempts, first to last, and what it did when. */
interface Ended {
  id: string;
  /** When it came, since 1970. */
  at: number;
  total: number;
  attempts: Decision[];
  spans: Span[];
}

export function Requests({ decisions }: { decisions: Decision[] }) {
  const [chosen, setChosen] = useState("");
  const all = endedOf(decisions);
  const rows = all.filter((each, number) => number < SHOWN || each.id === chosen);
  const longest = Math.max(...rows.map((each) => each.total), 1e-9);
  return (
    <section class="requests" aria-labelledby="requests-title">
      <h2 id="requests-title">
        Requests that ended <small>the last {rows.length}</small>
        <span class="legend">
          <Key color="queue">before it was routed</Key>
          <Key color="prefill">until the first token</Key>
          <Key color="decode">tokens</Key>
          <Key color="lost">moved</Key>
        </span>
      </h2>
      {rows.length === 0 && <p class="empty">No request has ended yet. Send one with the chat.</p>}
      <ol>
        {rows.map((each) => (
          <li key={each.id}>
            <button type="button" aria-expanded={each.id === chosen} onClick={() => setChosen(each.id === chosen ? "" : each.id)}>
              <code>{short(each.id)}</code>
              <Waterfall request={each} scale={longest} />
              <span class="number">{seconds(each.total)}</span>
            </button>
            {each.id === chosen && <Steps request={each} />}
          </li>
        ))}
      </ol>
    </section>
  );
}

function endedOf(decisions: Decision[]): Ended[] {
  const byId = new Map<string, Decision[]>();
  for (const each of decisions) byId.set(each.id, [each, ...(byId.get(each.id) ?? [])]);
  const found: Ended[] = [];
  for (const [id, attempts] of byId) {
    attempts.sort((a, b) => a.attempt - b.attempt);
    const [first, last] = [attempts[0], attempts[attempts.length - 1]];
    if (first.attempt !== 1 || last.ended === null) continue;
    const at = first.at - (first.queued ?? 0);
    found.push({ id, at, total: last.ended - at, attempts, spans: spansOf(attempts, at) });
  }
  return found;
}

function spansOf(attempts: Decision[], came: number): Span[] {
  const spans: Span[] = [{ begin: 0, end: attempts[0].at - came, kind: "queue", what: "at the gateway, before it was routed" }];
  for (const each of attempts) {
    const [begin, end] = [each.at - came, (each.ended ?? each.at) - came];
    const first = each.waited === null ? end : Math.min(begin + each.waited, end);
    spans.push({ begin, end: first, kind: "prefill", what: `${each.group}, until its first token` });
    if (end > first) spans.push({ begin: first, end, kind: "decode", what: `${each.group}, tokens` });
    if (each.outcome.startsWith("moved")) spans.push({ begin: end, end, kind: "lost", what: `${each.group}: ${each.outcome}` });
  }
  return spans;
}

function Waterfall({ request, scale }: { request: Ended; scale: number }) {
  const told = (span: Span) => `${span.what}${span.end > span.begin ? ` ${seconds(span.end - span.begin)}` : ""}`;
  return (
    <span class="waterfall" role="img" aria-label={request.spans.map(told).join("; ")}>
      {request.spans.map((each, number) => (
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

function Steps({ request }: { request: Ended }) {
  const last = request.attempts[request.attempts.length - 1];
  const who = [request.id, last.client_id, last.tenant].filter(Boolean).join(" · ");
  return (
    <div class="steps">
      <p>
        {clock(request.at)} · <code>{who}</code> · {count(last.tokens)} tokens in, {count(last.cached)} of them cached · {last.outcome}
      </p>
      <ol>
        {request.spans.map((each, number) => (
          <li key={number}>
            <span class="number">{seconds(each.begin)}</span> {each.what}
            {each.end > each.begin && `: ${seconds(each.end - each.begin)}`}
          </li>
        ))}
      </ol>
    </div>
  );
}
