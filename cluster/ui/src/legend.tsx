import type { ComponentChildren } from "preact";

/** What a color means. */
export function Key({ color, children }: { color: string; children: ComponentChildren }) {
  return (
    <span>
      <i class={color} /> {children}
    </span>
  );
}
