import { hierarchy, partition, type HierarchyRectangularNode } from "d3-hierarchy";
import { useState } from "preact/hooks";
import { count, plural } from "./format";
import { Key } from "./legend";
import type { Group, Prefix } from "./model";

interface Node {
  prefix: Prefix | null;
  children: Node[];
}

export function Prefixes({ prefixes, groups }: { prefixes: Prefix[]; groups: Group[] }) {
  const [chosen, setChosen] = useState("");
  const shown = prefixes.find((each) => each.name === chosen);
  const nodes = layout(prefixes);
  const depth = Math.max(0, ...nodes.map((each) => each.depth));
  return (
    <section class="prefixes" aria-labelledby="prefixes-title">
      <h2 id="prefixes-title">
        Shared prefixes <small>{plural(prefixes.length, "prefix").replace(/xs$/, "xes")}</small>
        <span class="legend">
          <Key color="kept-0">in no cache</Key>
          <Key color="kept-1">one group</Key>
          <Key color="kept-2">several</Key>
          <Key color="kept-3">half or more</Key>
        </span>
      </h2>
      {prefixes.length === 0 ? (
        <p class="empty">No prefix was asked for twice yet. Requests that begin alike, such as a chat's turns, show here.</p>
      ) : (
        <>
          <p class="hint">A bar is a prefix, known by its hash: as wide as its share of hits, and twice as long as the one above it.</p>
          <div class="icicle" style={{ height: `${depth * 24}px` }}>
            {nodes.map((node) => (
              <Bar key={node.data.prefix!.name} node={node} groups={groups.length} isChosen={node.data.prefix!.name === chosen} choose={setChosen} />
            ))}
          </div>
        </>
      )}
      <p class="chosen" aria-live="polite">
        {shown
          ? `${shown.name}… · ${plural(shown.tokens, "token")} · ${plural(shown.hits, "hit")} · ${holdersOf(shown)} · ${shown.model}`
          : prefixes.length > 0 && "Choose a bar to see which groups hold it."}
      </p>
    </section>
  );
}

interface BarProps {
  node: HierarchyRectangularNode<Node>;
  groups: number;
  isChosen: boolean;
  choose: (name: string) => void;
}

function Bar({ node, groups, isChosen, choose }: BarProps) {
  const prefix = node.data.prefix!;
  const label = `${count(prefix.tokens)} tok · ${plural(prefix.hits, "hit")}`;
  const kept = prefix.holders.length;
  const shade = kept < 2 ? kept : 2 * kept >= groups && groups > 2 ? 3 : 2;
  return (
    <button
      type="button"
      class={`kept-${shade}`}
      aria-pressed={isChosen}
      title={`${prefix.name}… · ${label} · ${holdersOf(prefix)}`}
      style={{ left: `${node.x0}%`, width: `${node.x1 - node.x0}%`, top: `${(node.depth - 1) * 24}px` }}
      onClick={() => choose(isChosen ? "" : prefix.name)}
    >
      {label} · {prefix.name.slice(0, 6)}
    </button>
  );
}

const holdersOf = (prefix: Prefix): string =>
  prefix.holders.length === 0
    ? "in no group's KV cache"
    : `held by ${prefix.holders.slice(0, 8).join(", ")}${prefix.holders.length > 8 ? ` and ${prefix.holders.length - 8} more` : ""}`;

/** A prefix is as wide as its hits; what of them went no further leaves room beside its children. */
function layout(prefixes: Prefix[]): HierarchyRectangularNode<Node>[] {
  const nodes = new Map<string, Node>(prefixes.map((prefix) => [prefix.name, { prefix, children: [] }]));
  const root: Node = { prefix: null, children: [] };
  for (const node of nodes.values()) (nodes.get(node.prefix!.parent ?? "") ?? root).children.push(node);
  const alone = (node: Node): number => {
    const below = node.children.reduce((sum, child) => sum + child.prefix!.hits, 0);
    return node.prefix ? Math.max(0, node.prefix.hits - below) : 0;
  };
  const tree = hierarchy(root, (node) => node.children)
    .sum(alone)
    .sort((a, b) => b.value! - a.value! || (a.data.prefix!.name < b.data.prefix!.name ? -1 : 1));
  return partition<Node>()
    .size([100, 1])(tree)
    .descendants()
    .filter((node) => node.data.prefix && node.x1 > node.x0);
}
