import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { ask, errorOf, events, own } from "./feed";
import { count, plural, seconds } from "./format";
import type { Decision, Group } from "./model";

interface Piece {
  text: string;
  /** Milliseconds since the first one came. */
  at: number;
}

interface Turn {
  question: string;
  pieces: Piece[];
  attempts: Decision[];
  isDone: boolean;
  error: string;
  cached: number | null;
  prompt: number | null;
  output: number | null;
  firstMs: number | null;
}

const LOOK_MS = 1000;

export function Chat({ models, groups }: { models: string[]; groups: Group[] }) {
  const [turns, setTurns] = useState<Turn[]>([]);
  const [text, setText] = useState("");
  const [model, setModel] = useState("");
  const stop = useRef<AbortController | null>(null);
  const log = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    if (log.current) log.current.scrollTop = log.current.scrollHeight;
  }, [turns]);
  const isBusy = turns.some((each) => !each.isDone);

  async function send(): Promise<void> {
    const question = text.trim();
    if (!question || isBusy) return;
    setText("");
    const turn: Turn = { question, pieces: [], attempts: [], isDone: false, error: "", cached: null, prompt: null, output: null, firstMs: null };
    const earlier = turns.filter((each) => !each.error);
    const show = () => setTurns([...turns, { ...turn }]);
    show();
    const aborted = (stop.current = new AbortController());
    try {
      await stream(turn, messagesOf(earlier, question), model || models[0], aborted.signal, show);
    } catch (error) {
      turn.error = aborted.signal.aborted ? "stopped" : String(error instanceof Error ? error.message : error);
    }
    turn.isDone = true;
    show();
  }

  return (
    <section class="chat" aria-labelledby="chat-title">
      <h2 id="chat-title">
        Chat
        {models.length > 1 && (
          <select aria-label="Model" value={model || models[0]} onChange={(event) => setModel(event.currentTarget.value)}>
            {models.map((each) => (
              <option key={each}>{each}</option>
            ))}
          </select>
        )}
        {turns.length > 0 && !isBusy && (
          <button type="button" onClick={() => setTurns([])}>
            Clear
          </button>
        )}
      </h2>
      <div class="turns" ref={log} role="log" tabindex={0} aria-label="Conversation">
        {turns.length === 0 && <p class="empty">Ask the model something. Below its answer stand the group that wrote it and the tokens that were cached; where a group is lost, the seam.</p>}
        {turns.map((each, number) => (
          <TurnView key={number} turn={each} groups={groups} />
        ))}
      </div>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          void send();
        }}
      >
        <textarea
          aria-label="Message"
          rows={2}
          placeholder="Message, sent with Enter"
          value={text}
          onInput={(event) => setText(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
              event.preventDefault();
              void send();
            }
          }}
        />
        {isBusy ? (
          <button type="button" onClick={() => stop.current?.abort()}>
            Stop
          </button>
        ) : (
          <button type="submit" disabled={!text.trim()}>
            Send
          </button>
        )}
      </form>
    </section>
  );
}

const messagesOf = (earlier: Turn[], question: string) => [
  ...earlier.flatMap((each) => [
    { role: "user", content: each.question },
    { role: "assistant", content: each.pieces.map((piece) => piece.text).join("") },
  ]),
  { role: "user", content: question },
];

async function stream(turn: Turn, messages: object[], model: string, signal: AbortSignal, show: () => void): Promise<void> {
  const begin = performance.now();
  const body = { model, messages, stream: true, stream_options: { include_usage: true } };
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw new Error(await errorOf(response));
  let id = "";
  let looked = performance.now();
  const look = async () => {
    looked = performance.now();
    const found = await own(`request_id=${encodeURIComponent(id)}`).catch(() => turn.attempts);
    turn.attempts = found.sort((a, b) => a.attempt - b.attempt);
    show();
  };
  for await (const [, data] of events(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const now = performance.now();
    if (!id) void ((id = chunk.id) && look());
    const delta = chunk.choices?.[0]?.delta;
    const text = (delta?.reasoning_content ?? "") + (delta?.content ?? "");
    if (text) {
      turn.firstMs ??= now - begin;
      turn.pieces.push({ text, at: now - begin - turn.firstMs });
    }
    if (chunk.usage) {
      turn.prompt = chunk.usage.prompt_tokens;
      turn.output = chunk.usage.completion_tokens;
      turn.cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? null;
    }
    if (now - looked > LOOK_MS) void look();
    show();
  }
  if (id) await look();
}

function TurnView({ turn, groups }: { turn: Turn; groups: Group[] }) {
  const seams = seamsOf(turn);
  const last = turn.attempts[turn.attempts.length - 1];
  const running = last && groups.length > 0 ? groups.find((each) => each.group === last.group) : undefined;
  let begin = 0;
  return (
    <article>
      <p class="question">{turn.question}</p>
      <p class="answer">
        {seams.map((seam) => {
          const text = textOf(turn.pieces.slice(begin, seam.piece));
          begin = seam.piece;
          return (
            <>
              {text}
              <span class="seam" title={seam.why}>{` ${seam.from} → ${seam.to} `}</span>
            </>
          );
        })}
        {textOf(turn.pieces.slice(begin))}
        {!turn.isDone && <span class="caret" aria-hidden="true" />}
      </p>
      {turn.error && <p class="alert">{turn.error}</p>}
      <p class="told">
        {last && <>group <b>{last.group}</b> ({last.reason}) · </>}
        {turn.firstMs !== null && <>first token {seconds(turn.firstMs / 1000)} · </>}
        {turn.prompt !== null && `${count(turn.cached ?? 0)} of ${plural(turn.prompt, "prompt token")} cached · ${count(turn.output)} out`}
        {!turn.isDone && running && ` ${plural(running.running, "sequence")} there`}
        {seams.map((seam) => (
          <span class="lost" key={seam.piece}>
            {" "}
            {seam.from} was left after {plural(seam.chars, "character")}: {seam.why}; {seam.to} went on
          </span>
        ))}
      </p>
    </article>
  );
}

const textOf = (pieces: Piece[]): string => pieces.map((piece) => piece.text).join("");

interface Seam {
  from: string;
  to: string;
  why: string;
  piece: number;
  chars: number;
}

/** Where another group went on. The gateway tells when each attempt was routed and had its first
 *  token; between the two no piece came, so that clocks need only agree within half of that time. */
function seamsOf(turn: Turn): Seam[] {
  const [first, ...others] = turn.attempts;
  if (!first || first.waited === null) return [];
  const origin = first.at + first.waited;
  return others.map((each, number) => {
    const former = turn.attempts[number];
    const middleMs = 1000 * (each.at + (each.waited ?? 0) / 2 - origin);
    const found = turn.pieces.findIndex((piece) => piece.at >= middleMs);
    const piece = found < 0 ? turn.pieces.length : found;
    const why = former.outcome.replace(/^moved(: )?/, "") || "it was lost";
    return { from: former.group, to: each.group, why, piece, chars: textOf(turn.pieces.slice(0, piece)).length };
  });
}
