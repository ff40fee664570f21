"use strict";
// The page of a running server: figures from /stats and /server_info, and a chat over the public API.

const $ = (id) => document.getElementById(id);
let key = "";
let modelName = "";
let conversation = [];
let running = null;

function headers(more) {
  return key ? { ...more, authorization: `Bearer ${key}` } : { ...more };
}

async function getJson(path) {
  const answer = await fetch(path, { headers: headers({}) });
  if (answer.status === 401) {
    $("key-form").hidden = false;
    throw new Error("an API key is needed");
  }
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

// ---- figures ------------------------------------------------------------------------------------------------------

function number(value, digits = 0) {
  return Number(value).toLocaleString("en", { maximumFractionDigits: digits });
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${number(value, unit ? 1 : 0)} ${units[unit]}`;
}

function figures(id, rows) {
  const list = $(id);
  list.replaceChildren();
  for (const [name, value] of rows) {
    const box = document.createElement("div");
    const term = document.createElement("dt");
    const figure = document.createElement("dd");
    term.textContent = name;
    figure.textContent = value;
    box.append(term, figure);
    list.append(box);
  }
}

function table(id, rows) {
  const body = $(id).querySelector("tbody");
  body.replaceChildren();
  for (const cells of rows) {
    const row = document.createElement("tr");
    for (const cell of cells) {
      const place = document.createElement("td");
      place.textContent = cell ?? "";
      row.append(place);
    }
    body.append(row);
  }
}

function showStatus(good, text) {
  document.querySelector(".dot").className = `dot ${good ? "good" : "bad"}`;
  $("status-text").textContent = text;
}

function showStats(stats) {
  const engine = stats.engine;
  const last = stats.history.at(-1) ?? { decode_per_s: 0, prefill_per_s: 0 };
  if (!stats.health.ok) showStatus(false, stats.health.problem ?? "ill");
  else showStatus(!stats.draining, stats.draining ? "draining before it stops" : "ready");
  figures("now", [
    ["running", number(engine.running ?? 0)],
    ["waiting", number(engine.waiting ?? 0)],
    ["generated / s", number(last.decode_per_s, 1)],
    ["read / s", number(last.prefill_per_s, 1)],
    ["generated in all", number(engine.decode_tokens ?? 0)],
    ["steps", number(engine.steps ?? 0)],
  ]);
  drawChart(stats.history, stats.time);
  const total = engine.pages_total || 1;
  const used = engine.pages_used ?? 0;
  const kept = engine.pages_kept ?? 0;
  $("bar-used").style.width = `${(100 * used) / total}%`;
  $("bar-kept").style.width = `${(100 * kept) / total}%`;
  $("memory-text").textContent =
    `${number(used)} pages in use, ${number(kept)} kept for later prompts, ${number(total - used - kept)} free`;
}

function drawChart(history, now) {
  const seconds = 300;
  const peak = Math.max(1, ...history.map((row) => row.decode_per_s));
  const points = history
    .filter((row) => now - row.time <= seconds)
    .map((row) => [600 - ((now - row.time) / seconds) * 600, 155 - (row.decode_per_s / peak) * 145]);
  const line = points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join(" ");
  $("chart-line").setAttribute("d", line);
  $("chart-area").setAttribute(
    "d", points.length ? `${line} L${points.at(-1)[0].toFixed(1)} 160 L${points[0][0].toFixed(1)} 160 Z` : "");
  $("chart-peak").textContent = `peak ${number(peak, 1)}`;
}

function showInfo(info) {
  modelName = info.model;
  $("model").textContent = `${info.model} · context ${number(info.context)} tokens${info.device ? ` · ${info.device}` : ""}`;
  const memory = info.memory ?? {};
  figures("memory", [
    ["all caches", bytes(memory.total_bytes ?? 0)],
    ["room for", `${number(memory.tokens ?? 0)} tokens`],
    ["recipe", info.recipe ?? "–"],
    ["kernel table", info.kernel_table ?? "–"],
  ]);
  table("kernels", (info.kernels ?? []).map((row) =>
    [row.op, row.chosen ?? "none", row.layers ?? "all", row.source, row.status ?? ""]));
  table("settings", (info.settings ?? []).map((row) => [row.setting, row.value, row.source]));
}

async function refresh() {
  try {
    showStats(await getJson("/stats"));
    if (!modelName) showInfo(await getJson("/server_info"));
  } catch (error) {
    showStatus(false, error.message);
  }
}

// ---- chat ---------------------------------------------------------------------------------------------------------

function addMessage(role) {
  const box = document.createElement("div");
  box.className = `message ${role}`;
  const reasoning = document.createElement("span");
  reasoning.className = "reasoning";
  const answer = document.createElement("span");
  answer.className = "answer";
  box.append(reasoning, answer);
  const hint = $("messages").querySelector(".hint");
  if (hint) hint.remove();
  $("messages").append(box);
  box.scrollIntoView({ block: "nearest" });
  return { box, reasoning, answer };
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function send(text) {
  conversation.push({ role: "user", content: text });
  addMessage("user").answer.textContent = text;
  const shown = addMessage("assistant");
  const thinking = $("thinking").checked;
  running = new AbortController();
  busy(true);
  try {
    const answer = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: headers({ "content-type": "application/json" }),
      body: JSON.stringify({
        model: modelName,
        messages: conversation,
        stream: true,
        thinking: { type: thinking ? "enabled" : "disabled" },
      }),
      signal: running.signal,
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    for await (const event of events(answer.body)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices[0].delta;
      shown.reasoning.textContent += delta.reasoning_content ?? "";
      shown.answer.textContent += delta.content ?? "";
      $("messages").scrollTop = $("messages").scrollHeight;
    }
    conversation.push({ role: "assistant", content: shown.answer.textContent });
  } catch (error) {
    conversation.pop();
    if (error.name !== "AbortError") {
      shown.box.className = "message error";
      shown.answer.textContent += ` ${error.message}`;
    }
  } finally {
    running = null;
    busy(false);
  }
}

function busy(yes) {
  $("send").disabled = yes;
  $("stop").hidden = !yes;
}

$("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("input").value.trim();
  if (!text || running || !modelName) return;
  $("input").value = "";
  send(text);
});
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("chat-form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  conversation = [];
  $("messages").replaceChildren();
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value;
  $("key-form").hidden = true;
  refresh();
});

refresh();
setInterval(refresh, 2000);
