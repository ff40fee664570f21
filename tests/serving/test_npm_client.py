"""OpenAI's client for Node against a live server: a chat, a stream, tools, a parsed form, an error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from in_process import say
from markup import call, calls

SCRIPT = """
import { createRequire } from "node:module";
const require = createRequire(process.env.SMOKE_MODULES + "/");
const OpenAI = require("openai").default ?? require("openai");
const said = JSON.parse(process.env.SMOKE_SAID);
const client = new OpenAI({ baseURL: process.env.SMOKE_URL + "/v1", apiKey: "none", maxRetries: 0 });
const ask = (content, more = {}) =>
  client.chat.completions.create({ model: "tiny", messages: [{ role: "user", content }], ...more });
const found = {};
const whole = await ask(said.text, { thinking: { type: "disabled" } });
found.whole = whole.choices[0].message.content;
found.reasoning = (await ask(said.reasoning)).choices[0].message.reasoning_content;
let text = "", usage = null;
for await (const chunk of await ask(said.text, {
  stream: true, stream_options: { include_usage: true }, thinking: { type: "disabled" } })) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
found.stream = text;
found.tokens = usage.completion_tokens;
const tools = [{ type: "function", function: { name: "find", parameters: { type: "object", properties: {} } } }];
const made = await ask(said.call, { tools, thinking: { type: "disabled" } });
found.call = made.choices[0].message.tool_calls.map((one) => [one.function.name, JSON.parse(one.function.arguments)]);
const runner = client.chat.completions.stream({
  model: "tiny", messages: [{ role: "user", content: said.call }], tools, thinking: { type: "disabled" } });
found.streamed_call = (await runner.finalMessage()).tool_calls[0].function.name;
const response = await client.responses.create({ model: "tiny", input: said.text, reasoning: { effort: "none" } });
found.response = response.output_text;
found.models = (await client.models.list()).data.map((one) => one.id);
try { await ask(said.text, { temperature: 9 }); } catch (error) { found.error = [error.status, error.param]; }
console.log(JSON.stringify(found));
"""


def modules() -> Path | None:
    """A folder whose node_modules has the client: `npm install --prefix .cache/npm openai` puts it there."""
    places = [Path(__file__).resolve().parents[2] / ".cache" / "npm", Path("/usr/local/lib")]
    return next((place for place in places if (place / "node_modules" / "openai").is_dir()), None)


def test_the_node_client(live: Any, tmp_path: Path) -> None:
    node, folder = shutil.which("node"), modules()
    if node is None or folder is None:
        pytest.skip("needs node and its package openai: npm install --prefix .cache/npm openai")
    said = {
        "text": say("Hello 안녕 👋"),
        "reasoning": say("Let me see.</think>Yes."),
        "call": say(calls(call("find", q="x", n=[1, 2]))),
    }
    script = tmp_path / "smoke.mjs"
    script.write_text(SCRIPT)
    env = {
        "PATH": os.environ["PATH"],
        "SMOKE_MODULES": str(folder),
        "SMOKE_URL": live.url,
        "SMOKE_SAID": json.dumps(said),
    }
    done = subprocess.run([node, script], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("tokens") > 5
    assert found == {
        "whole": "Hello 안녕 👋",
        "reasoning": "Let me see.",
        "stream": "Hello 안녕 👋",
        "call": [["find", {"q": "x", "n": [1, 2]}]],
        "streamed_call": "find",
        "response": "Hello 안녕 👋",
        "models": ["tiny"],
        "error": [400, "temperature"],
    }
