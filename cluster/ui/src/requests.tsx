import { useState } from "preact/hooks";
import { clock, count, seconds, short } from "./format";
import type { Finished } from "./model";

const SHOWN = 12;

export function Requests({ requests }: { requests: Finished[] }) {
  const [chosen, setChosen] = useState("");
  const rows = requests.slice(0, SHOWN);
  const picked = requests.find((each) => each.id === chosen);
  if (picked && !rows.includes(picked)) rows.push(picked);
  const longest = Math.max(...rows.map((each) => each.total), 1e-9);
  return (
    <section class="requests" aria-labelledby="requests-title">
      <h2 id="requests-title">
        Requests that ended <small>the last {rows.length}</small>
        <span class="legend">
          <i class="queue" /> in the queue <i class="prefill" /> until the first token <i class="decode" /> tokens <i class="lost" /> group lost
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

export type Span = { begin: number; end: number; kind: "queue" | "prefill" | "decode" | "lost"; what: string };

/** What a request did when, in seconds since it came. */
export function spansOf(request: Finished): Span[] {
  const spans: Span[] = [];
  const begin = request.queued ?? request.attempts[0]?.at ?? request.total;
  if (begin > 0) spans.push({ begin: 0, end: begin, kind: "queue", what: "in the gateway's queue" });
  request.attempts.forEach((each, number) => {
    const end = each.end ?? request.attempts[number + 1]?.at ?? request.total;
    const first = Math.min(each.first ?? end, end);
    spans.push({ begin: each.at, end: first, kind: "prefill", what: `${each.group}: until its first token` });
    if (end > first) spans.push({ begin: first, end, kind: "decode", what: `${each.group}: tokens` });
    if (each.why) spans.push({ begin: end, end, kind: "lost", what: each.why });
  });
  return spans;
}

export function Waterfall({ request, scale }: { request: Finished; scale: number }) {
  return (
    <span class="waterfall" role="img" aria-label={spansOf(request).map((each) => `${each.what} ${seconds(each.end - each.begin)}`).join("; ")}>
      {spansOf(request).map((each, number) => (
        <i
          key={number}
          class={each.kind}
          title={`${each.what}: ${seconds(each.end - each.begin)}`}
          style={{ left: `${(100 * each.begin) / scale}%`, width: `${(100 * (each.end - each.begin)) / scale}%` }}
        />
      ))}
    </span>
  );
}

function Steps({ request }: { request: Finished }) {
  return (
    <div class="steps">
      <p>
        {clock(request.at)} · <code>{request.id}</code>
        {request.client_id && <> · {request.client_id}</>} · {request.model} · {count(request.prompt)} prompt tokens,{" "}
        {count(request.cached)} of them cached, {count(request.output)} out · {request.outcome}
      </p>
      <ol>
        {spansOf(request).map((each, number) => (
          <li key={number}>
            <span class="number">{seconds(each.begin)}</span> {each.what}
            {each.end > each.begin && <> for {seconds(each.end - each.begin)}</>}
          </li>
        ))}
      </ol>
    </div>
  );
}
