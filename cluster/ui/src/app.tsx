import { useState } from "preact/hooks";
import { Charts } from "./charts";
import { Chat } from "./chat";
import { Decisions } from "./decisions";
import { key as storedKey, type Shown } from "./feed";
import { plural } from "./format";
import { generates } from "./model";
import { Groups } from "./groups";
import { Prefixes } from "./prefixes";
import { Requests } from "./requests";

const SAID: Record<Shown["status"], string> = {
  connecting: "connecting",
  live: "live",
  lost: "connection lost",
  "no-key": "key wanted",
  tenant: "tenant's view",
};

export function App({ status, why, view, onKey }: Shown & { onKey: (key: string) => void }) {
  const groups = [...view.groups.values()];
  const isOperator = status !== "tenant" && status !== "no-key";
  const models = (view.gateway?.models ?? []).filter(generates).map((each) => each.name);
  const canChat = models.length > 0 || !view.gateway?.models.length;
  return (
    <>
      <header>
        <h1>Quire</h1>
        <p class={`status ${status}`} role="status">
          {SAID[status]}
        </p>
        {view.gateway?.name && (
          <p class="facts">
            gateway <b>{view.gateway.name}</b>
            {view.gateway.num > 1 && ` · one of ${view.gateway.num}, and shows its own requests`}
            {` · ${plural(view.gateway.inflight, "completion")} under way · version ${view.gateway.version}`}
          </p>
        )}
        <KeyForm onKey={onKey} isWanted={status === "no-key"} />
      </header>
      {why && <p class="alert" role="alert">{why}</p>}
      {status === "no-key" ? (
        <p class="empty">Enter an API key: an operator's for all that is shown here, a tenant's for its own requests and the chat.</p>
      ) : (
        <main>
          {isOperator && <Charts series={view.series} />}
          {isOperator && <Groups groups={groups} total={view.gateway?.num_groups ?? 0} />}
          {!isOperator && (
            <p class="empty">
              This key is a tenant's: it sees its own decisions and may chat. The cluster is shown for an operator's
              key, whose line in the file of keys is <code>KEY *</code>.
            </p>
          )}
          {canChat ? <Chat models={models} groups={groups} /> : <p class="empty">No model here writes text: there is nobody to chat with.</p>}
          {isOperator && <Requests calls={view.calls} />}
          {isOperator && <Prefixes prefixes={view.prefixes} groups={groups} />}
          <Decisions decisions={view.decisions} />
        </main>
      )}
      <footer>
        <a href="docs">HTTP API</a> · <a href="ui/licenses.txt">licences of this page</a>
      </footer>
    </>
  );
}

function KeyForm({ onKey, isWanted }: { onKey: (key: string) => void; isWanted: boolean }) {
  const [value, setValue] = useState(storedKey.get());
  return (
    <form
      class="key"
      onSubmit={(event) => {
        event.preventDefault();
        onKey(value);
      }}
    >
      <label>
        API key{" "}
        <input
          type="password"
          autocomplete="off"
          placeholder="none"
          value={value}
          autofocus={isWanted}
          onInput={(event) => setValue(event.currentTarget.value)}
        />
      </label>
      <button type="submit">Use</button>
    </form>
  );
}
