import { render } from "preact";
import { App } from "./app";
import { follow, key } from "./feed";
import "uplot/dist/uPlot.min.css";
import "./style.css";

const root = document.getElementById("app")!;
let stop = new AbortController();

function begin(): void {
  stop.abort();
  stop = new AbortController();
  void follow((shown) => render(<App {...shown} onKey={enter} />, root), stop.signal);
}

function enter(value: string): void {
  key.set(value.trim());
  begin();
}

begin();
