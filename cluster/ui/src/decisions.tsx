import { clock, count, seconds, short } from "./format";
import type { Decision } from "./model";

const SHOWN = 40;

export function Decisions({ decisions: all }: { decisions: Decision[] }) {
  const decisions = all.slice(0, SHOWN);
  return (
    <section class="decisions" aria-labelledby="decisions-title">
      <h2 id="decisions-title">
        Routing decisions <small>the last {decisions.length}</small>
      </h2>
      {decisions.length === 0 ? (
        <p class="empty">
          No request yet. Use the chat, or send one: <code>{`curl ${new URL("v1/chat/completions", document.baseURI)} -H 'Content-Type: application/json' -d '{"messages": [{"role": "user", "content": "Hello"}]}'`}</code>
        </p>
      ) : (
        <div class="scroll" tabindex={0} role="group" aria-label="Table of routing decisions">
          <table>
            <thead>
              <tr>
                <th scope="col">at</th>
                <th scope="col">request</th>
                <th scope="col">group</th>
                <th scope="col">reason</th>
                <th scope="col" class="number">prompt</th>
                <th scope="col" class="number">cached of expected</th>
                <th scope="col" class="number">first token</th>
                <th scope="col" class="number">forecast</th>
                <th scope="col">truth ÷ forecast</th>
                <th scope="col">outcome</th>
              </tr>
            </thead>
            <tbody>
              {decisions.map((each) => (
                <tr key={`${each.id}/${each.attempt}`}>
                  <td>{clock(each.at)}</td>
                  <td title={[each.id, each.client_id, each.tenant].filter(Boolean).join(" · ")}>
                    <code>{short(each.id)}</code>
                    {each.attempt > 1 && <small> attempt {each.attempt}</small>}
                  </td>
                  <td>{each.group}</td>
                  <td title={`of ${each.candidates} groups`}>{each.reason}</td>
                  <td class="number">{count(each.tokens)} tok</td>
                  <td class="number">
                    {count(each.cached)} of {count(each.expected)}
                  </td>
                  <td class="number">{seconds(each.waited)}</td>
                  <td class="number">{seconds(each.forecast)}</td>
                  <td>
                    <Error decision={each} />
                  </td>
                  <td class="outcome" title={each.outcome}>
                    {each.outcome || "under way"}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}

const MOST = 8;

/** To the right where the first token came later than forecast, on a scale of factors up to 8. */
function Error({ decision }: { decision: Decision }) {
  if (!decision.forecast || !decision.waited) return <span class="faint">–</span>;
  const ratio = decision.waited / decision.forecast;
  const share = 50 * Math.min(1, Math.abs(Math.log(ratio)) / Math.log(MOST));
  const told = `${ratio.toFixed(1)}×`;
  const style = ratio >= 1 ? { left: "50%", width: `${share}%` } : { right: "50%", width: `${share}%` };
  return (
    <span class="error">
      <span class="scale" aria-hidden="true">
        <i class={ratio >= 1 ? "late" : "early"} style={style} />
      </span>
      {told}
    </span>
  );
}
