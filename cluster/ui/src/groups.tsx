import { useState } from "preact/hooks";
import { count, percent, plural } from "./format";
import { Key } from "./legend";
import type { Group } from "./model";

export function Groups({ groups, total }: { groups: Group[]; total: number }) {
  const [chosen, setChosen] = useState("");
  const sorted = [...groups].sort((a, b) => byName.compare(keyOf(a), keyOf(b)));
  const shown = sorted.find((each) => keyOf(each) === chosen);
  const ready = groups.filter((each) => each.state === "ready").length;
  const models = new Set(groups.map((each) => each.model)).size;
  return (
    <section class="groups" aria-labelledby="groups-title">
      <h2 id="groups-title">
        Replica groups <small>{`${ready} of ${total} ready`}</small>
        <span class="legend">
          KV blocks <Key color="held">held</Key>
          <Key color="cached">cached</Key>
          <Key color="free">free</Key>
        </span>
      </h2>
      {groups.length === 0 && <p class="empty">No group yet. The gateway's log says why; <code>quire status</code> lists what is starting.</p>}
      {total > groups.length && groups.length > 0 && <p class="empty">{`${total - groups.length} more groups are not shown.`}</p>}
      <ul>
        {sorted.map((each) => (
          <li key={keyOf(each)}>
            <Card group={each} withModel={models > 1} isChosen={keyOf(each) === chosen} choose={setChosen} />
          </li>
        ))}
      </ul>
      {shown && <Details group={shown} />}
    </section>
  );
}

const byName = new Intl.Collator("en", { numeric: true });
const keyOf = (group: Group): string => `${group.model}/${group.group}`;

interface CardProps {
  group: Group;
  withModel: boolean;
  isChosen: boolean;
  choose: (key: string) => void;
}

function Card({ group, withModel, isChosen, choose }: CardProps) {
  const key = keyOf(group);
  return (
    <button type="button" class={`card ${group.state}`} aria-expanded={isChosen} onClick={() => choose(isChosen ? "" : key)}>
      <span class="line">
        <b class="name" title={group.group}>{withModel ? `${group.group} · ${group.model}` : group.group}</b>
        {group.ranks > 1 && <span class="faint">{group.ranks} ranks</span>}
        <span class="state">{group.state}</span>
      </span>
      <Blocks group={group} />
      <span class="line numbers">
        <span>
          <b>{count(group.running)}</b> run
        </span>
        <span class={group.waiting ? "warn" : ""}>
          <b>{count(group.waiting)}</b> wait
        </span>
        <span>
          <b>{count(Math.round(group.tps))}</b> tok/s
        </span>
        <span>
          <b>{percent(group.hit)}</b> hit
        </span>
      </span>
    </button>
  );
}

function Blocks({ group }: { group: Group }) {
  const total = group.held + group.cached + group.free;
  const share = (blocks: number) => ({ width: `${total ? (100 * blocks) / total : 0}%` });
  const told = `KV blocks: ${count(group.held)} held, ${count(group.cached)} cached, ${count(group.free)} free`;
  return (
    <span class="strip" role="img" aria-label={told} title={told}>
      <i class="held" style={share(group.held)} />
      <i class="cached" style={share(group.cached)} />
    </span>
  );
}

const TIERS = ["KV cache", "host memory", "disk"];

function Details({ group }: { group: Group }) {
  const rows: [string, string][] = [
    ["model", group.model],
    ["address", group.address],
    ["ranks", count(group.ranks)],
    ["sequences", `${count(group.running)} of at most ${group.max_running ? count(group.max_running) : "any number"}`],
    ["prompt tokens to compute", count(group.prefill)],
    ["KV blocks", `${count(group.held)} held · ${count(group.cached)} cached · ${count(group.free)} free`],
    ["block size", plural(group.block_size, "token")],
    ["tiers", TIERS.slice(0, group.tiers).join(", ") || "–"],
    ["tokens from host memory", count(group.host)],
    ["tokens from disk", count(group.disk)],
    ["tokens from other groups", count(group.peer)],
  ];
  return (
    <dl class="details" aria-live="polite">
      <div class="whole">
        <dt>{group.group}</dt>
        <dd>{group.why || group.state}</dd>
      </div>
      {rows.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}
