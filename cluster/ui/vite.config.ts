import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { defineConfig, type Plugin } from "vite";

const OUT = "../quire/cluster/features/live/ui";

/** SHA-256 over the names and contents of all that the build is made of. */
function sourceDigest(): string {
  const names = readdirSync("src", { recursive: true, withFileTypes: true })
    .filter((each) => each.isFile())
    .map((each) => join(each.parentPath, each.name));
  names.push("index.html", "package-lock.json", "vite.config.ts");
  const digest = createHash("sha256");
  for (const name of names.sort()) digest.update(`${name}\0`).update(readFileSync(name)).update("\0");
  return digest.digest("hex");
}

/** The licences of what the page contains, and the digest of its sources. */
function notes(): Plugin {
  return {
    name: "notes",
    enforce: "post",
    generateBundle(_, bundle) {
      // The page is at `/ui`, without a slash, maybe below a proxy's prefix: so is all that it names.
      const page = bundle["index.html"];
      if (page.type === "asset")
        page.source = String(page.source).replaceAll('"./', '"ui/').replaceAll(" crossorigin", "");
      const used = Object.keys(JSON.parse(readFileSync("package.json", "utf8")).dependencies);
      const texts = used.map((name) => {
        const { version } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
        const licence = readFileSync(`node_modules/${name}/LICENSE`, "utf8").trim();
        return `${name} ${version}\n\n${licence}\n`;
      });
      const rule = `\n${"-".repeat(80)}\n\n`;
      this.emitFile({ type: "asset", fileName: "licenses.txt", source: texts.join(rule) });
      this.emitFile({ type: "asset", fileName: "sources.txt", source: `${sourceDigest()}\n` });
    },
  };
}

export default defineConfig({
  base: "./",
  esbuild: { jsx: "automatic", jsxImportSource: "preact", legalComments: "none" },
  plugins: [notes()],
  build: {
    outDir: OUT,
    emptyOutDir: true,
    modulePreload: false,
    assetsInlineLimit: 0,
    target: "es2022",
  },
});
