"use strict";
// Sends the calls of this page to the server that it came from, with the key that was typed.
const MAX_SHOWN_CHARS = 200000;
const key = document.getElementById("key");
key.value = sessionStorage.getItem("quire-key") || "";
key.form.addEventListener("submit", (event) => event.preventDefault());
key.addEventListener("input", () => sessionStorage.setItem("quire-key", key.value.trim()));

const authorization = () => (key.value.trim() ? { Authorization: `Bearer ${key.value.trim()}` } : {});

// What models must be for to answer a call, by its path; where none is, the first one is named.
const TASKS = [[/embed/, ["embed"]], [/rank|score/, ["score", "embed"]], [/./, ["generate"]]];
function fitting(models, path) {
  const [, tasks] = TASKS.find(([pattern]) => pattern.test(path));
  const fit = tasks.map((task) => models.find((each) => each.task === task)).find(Boolean);
  return (fit || models[0]).root;
}

// Where several models are served, each call must name one: so do the bodies here, once a form opens.
let isNamed = false;
async function nameModel() {
  const answer = isNamed ? null : await fetch("/v1/models", { headers: authorization() });
  if (!answer || !answer.ok || isNamed) return;
  isNamed = true;
  const models = (await answer.json()).data.filter((each) => !each.parent);
  const names = [...new Set(models.map((each) => each.root))];
  for (const path of document.querySelectorAll("input[name=path]")) {
    path.value = path.value.replace("{model}", encodeURIComponent(names[0]));
  }
  if (names.length < 2) return;
  for (const body of document.querySelectorAll("textarea[data-names-model]")) {
    const fields = JSON.parse(body.value);
    const model = fitting(models, body.form.dataset.path);
    if (!fields.model) body.value = JSON.stringify({ model, ...fields }, null, 2);
  }
}
document.addEventListener("toggle", () => nameModel().catch(() => {}), true);

async function send(form, signal) {
  const shown = form.querySelector(".answer");
  const status = form.querySelector(".status");
  const body = form.querySelector("textarea");
  const path = form.querySelector("input[name=path]");
  const headers = authorization();
  if (body) headers["Content-Type"] = "application/json";
  shown.hidden = false;
  shown.textContent = "";
  status.textContent = "sent …";
  const begin = performance.now();
  const seconds = () => `${((performance.now() - begin) / 1000).toFixed(2)} s`;
  const answer = await fetch(path ? path.value : form.dataset.path, {
    method: form.dataset.method, headers, body: body ? body.value : undefined, signal,
  });
  const first = seconds();
  const reader = answer.body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    text = (text + decoder.decode(value, { stream: true })).slice(-MAX_SHOWN_CHARS);
    shown.textContent = text;
    status.textContent = `${answer.status}, first byte after ${first}, so far ${seconds()}`;
  }
  if ((answer.headers.get("content-type") || "").startsWith("application/json")) {
    shown.textContent = JSON.stringify(JSON.parse(text), null, 2);
  }
  status.textContent = `${answer.status} ${answer.statusText}, first byte after ${first}, all after ${seconds()}`;
}

for (const form of document.querySelectorAll("form[data-path]")) {
  const [start, stop] = form.querySelectorAll("button");
  let running = null;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    running = new AbortController();
    start.disabled = true;
    stop.disabled = false;
    try {
      await send(form, running.signal);
    } catch (error) {
      form.querySelector(".status").textContent = running.signal.aborted ? "stopped" : String(error);
    }
    start.disabled = false;
    stop.disabled = true;
  });
  stop.addEventListener("click", () => running && running.abort());
}
