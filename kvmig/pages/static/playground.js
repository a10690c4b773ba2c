// The playground: a chat with any model that the person may use, by the API's own route. Each part
// of an answer is tinted by the instance that wrote it. All text of models is text, never HTML.

const page = document.getElementById("playground");
const ui = page.dataset.ui;
const csrf = page.querySelector("input[name=csrf]").value;
const part = (name) => page.querySelector(`[data-part=${name}]`);
const log = part("log"), form = part("form"), model = part("model"), text = part("text");
const system = part("system"), heat = part("temperature"), most = part("tokens");
const tools = part("tools"), choice = part("choice"), image = part("image"), wrong = part("wrong"), said = part("said");
const send = part("send"), stop = part("stop"), move = part("move"), clear = part("clear");
const TINTS = 8;
const MOST_IMAGE = 10e6;

const messages = []; // as the API has them
let asked = []; // what takes back each message that has no answer yet
const instances = []; // in the order in which they first wrote
let running = null; // the answer that comes now, or the message that is made for it

// -- what is shown

function element(name, words = "", kind = "") {
  const made = document.createElement(name);
  made.textContent = words;
  if (kind) made.className = kind;
  return made;
}

function show(role, words = "") {
  const row = element("article", "", `message ${role}`);
  const body = element("div", words, "words");
  row.append(element("h2", { user: "You", assistant: "Model", tool: "Tool" }[role]), body);
  part("empty")?.remove();
  log.append(row);
  row.scrollIntoView({ block: "end" });
  return { row, body };
}

function complain(sentence) {
  wrong.textContent = sentence;
  wrong.hidden = !sentence;
}

function busy(answer) {
  running = answer;
  send.disabled = answer !== null;
  stop.hidden = answer === null;
  if (move) move.hidden = answer === null;
  log.setAttribute("aria-busy", answer !== null);
}

function tint(instance) {
  if (!instances.includes(instance)) {
    instances.push(instance);
    const row = element("li");
    row.append(element("span", instance, `tint tint-${(instances.length - 1) % TINTS}`));
    part("legend").append(row);
    part("legend").hidden = false;
  }
  return instances.indexOf(instance) % TINTS;
}

// The text of one answer, in spans of one instance each.
class Written {
  constructor(body) {
    this.body = body;
    this.tokens = 0; // that are shown
    this.changes = []; // from which token on which instance writes
    this.last = null;
    this.text = "";
  }

  note({ instance, token }) {
    this.changes.push({ instance, token });
  }

  writer(counted) {
    if (!counted) return this.changes.at(-1)?.instance;
    return this.changes.findLast((one) => one.token <= this.tokens)?.instance;
  }

  add(words, kind, tokens) {
    const instance = this.writer(tokens !== undefined);
    if (tokens !== undefined) this.tokens = tokens;
    if (!words) return;
    if (kind === "text") this.text += words;
    if (this.last === null || this.last.instance !== instance || this.last.kind !== kind) {
      const span = element("span", "", kind);
      if (instance !== undefined) {
        span.classList.add("tint", `tint-${tint(instance)}`);
        span.dataset.instance = instance;
        span.title = `written by ${instance}`;
        if (this.last?.instance !== instance) {
          const mark = element("small", instance, "writer");
          this.body.append(mark);
        }
      }
      this.body.append(span);
      this.last = { instance, kind, span };
    }
    this.last.span.append(words);
    this.body.parentElement.scrollIntoView({ block: "end" });
  }
}

// -- the call

function given() {
  const body = { model: model.value, messages: [...messages], stream: true };
  if (system.value.trim()) body.messages.unshift({ role: "system", content: system.value });
  if (heat.value !== "") body.temperature = Number(heat.value);
  if (most.value !== "") body.max_tokens = Number(most.value);
  if (tools.value.trim()) {
    body.tools = JSON.parse(tools.value);
    if (choice.value !== "auto") body.tool_choice = choice.value;
  }
  return body;
}

async function* lines(stream) {
  let rest = "";
  for await (const bytes of decoded(stream)) {
    const found = (rest + bytes).split("\n");
    rest = found.pop();
    yield* found;
  }
}

async function* decoded(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value;
  }
}

function addCalls(calls, deltas) {
  for (const one of deltas) {
    const call = (calls[one.index ?? 0] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    call.id ||= one.id ?? "";
    call.function.name += one.function?.name ?? "";
    call.function.arguments += one.function?.arguments ?? "";
  }
}

async function refusal(answer) {
  try {
    const found = await answer.json();
    return found.error?.message ?? found.message ?? `status ${answer.status}`;
  } catch {
    return `status ${answer.status}`;
  }
}

async function ask() {
  let body;
  try {
    body = given();
  } catch (error) {
    busy(null);
    takeBack();
    complain(`The tools are not JSON: ${error.message}`);
    return;
  }
  complain("");
  said.textContent = "";
  const stopper = new AbortController();
  const shown = show("assistant");
  const written = new Written(shown.body);
  const answer = { stopper, id: "", model: body.model };
  busy(answer);
  const calls = [];
  let usage = null, reason = null, failed = "", waits = "";
  try {
    const options = { include_usage: true, continuous_usage_stats: true };
    const came = await fetch(`${ui}/v1/chat/completions`, {
      method: "POST",
      headers: { "content-type": "application/json", "x-csrf-token": csrf, "x-kvmig-writers": "1" },
      body: JSON.stringify({ ...body, stream_options: options }),
      signal: stopper.signal,
    });
    answer.id = came.headers.get("x-request-id") ?? "";
    shown.row.dataset.request = answer.id;
    if (came.status === 401) {
      location.reload();
      return;
    }
    if (!came.ok) throw new Error(await refusal(came));
    for await (const line of lines(came.body)) {
      if (line.startsWith(": kvmig ")) written.note(JSON.parse(line.slice(8)));
      else if (line.startsWith(": ")) said.textContent = waits = line.slice(2);
      if (!line.startsWith("data: {")) continue;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      if (waits) said.textContent = waits = "";
      const delta = choice.delta ?? {};
      const tokens = chunk.usage?.completion_tokens;
      written.add(delta.reasoning ?? delta.reasoning_content ?? "", "reasoning", undefined);
      written.add(delta.content ?? "", "text", tokens);
      addCalls(calls, delta.tool_calls ?? []);
      reason = choice.finish_reason ?? reason;
    }
  } catch (error) {
    failed = error.name === "AbortError" ? "stopped" : error.message;
  }
  busy(null);
  const made = { role: "assistant", content: written.text };
  if (calls.length) made.tool_calls = calls;
  if (written.text || calls.length) messages.push(made);
  else if (failed) takeBack();
  asked = [];
  for (const call of calls) showCall(shown.row, call);
  const end = [failed || reason || ""];
  if (usage) end.push(`${usage.prompt_tokens} + ${usage.completion_tokens ?? 0} tokens`);
  shown.row.append(element("footer", end.filter(Boolean).join(" · ")));
  if (failed && failed !== "stopped") complain(failed);
  showCode();
  text.focus();
}

/** Let the messages that got no answer be no part of what is asked next. */
function takeBack() {
  while (messages.length && messages.at(-1).role !== "assistant") messages.pop();
  for (const one of asked) one();
  asked = [];
}

function showCall(row, call) {
  const box = element("form", "", "tool-call");
  const result = element("textarea");
  result.rows = 2;
  result.required = true;
  const label = element("label", `Result of ${call.function.name}`);
  label.append(result);
  const button = element("button", "Send the result");
  box.append(element("code", `${call.function.name}(${call.function.arguments})`), label, button);
  box.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return;
    button.disabled = true;
    messages.push({ role: "tool", tool_call_id: call.id, content: result.value });
    const shown = show("tool", result.value);
    asked.push(() => {
      shown.row.remove();
      button.disabled = false;
    });
    const open = row.querySelectorAll(".tool-call button:not(:disabled)");
    if (!open.length) ask();
  });
  row.append(box);
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

async function submit() {
  const words = text.value.trim(), file = image.files[0];
  if (running || (!words && !file)) return;
  if (file && file.size > MOST_IMAGE) {
    complain(`The image has ${file.size} bytes, must have at most ${MOST_IMAGE}.`);
    return;
  }
  busy({}); // before anything is waited for: a second Enter finds it so
  const shown = show("user", words);
  let content = words;
  try {
    if (file) content = await withImage(words, file, shown.row);
  } catch (error) {
    busy(null);
    shown.row.remove();
    complain(`The image can't be read: ${error.message}`);
    return;
  }
  const files = image.files;
  messages.push({ role: "user", content });
  asked.push(() => {
    shown.row.append(element("footer", "not answered: it is not sent again with the next message"));
    if (text.value || image.files.length) return;
    text.value = words;
    image.files = files;
  });
  text.value = "";
  image.value = "";
  await ask();
}

/** The content of a message with an image, which its row shows, too. */
async function withImage(words, file, row) {
  const url = await read(file);
  const picture = element("img");
  picture.src = url;
  picture.alt = file.name;
  row.append(picture);
  return [{ type: "text", text: words }, { type: "image_url", image_url: { url } }];
}

// -- moving the stream

async function moveStream() {
  const answer = running;
  if (!answer?.id) return;
  move.disabled = true;
  try {
    const came = await fetch(`${ui}/playground/move`, {
      method: "POST",
      headers: { "x-csrf-token": csrf },
      body: new URLSearchParams({ model: answer.model, request_id: answer.id }),
    });
    const found = await came.json();
    said.textContent = found.sentence;
  } catch (error) {
    said.textContent = error.message;
  } finally {
    move.disabled = false;
  }
}

// -- the same call as a program makes it

function showCode() {
  let body;
  try {
    body = given();
  } catch {
    return;
  }
  while (body.messages.at(-1)?.role === "assistant") body.messages.pop();
  if (text.value || !body.messages.some((one) => one.role === "user")) {
    body.messages.push({ role: "user", content: text.value || "Hello" });
  }
  for (const one of body.messages) {
    if (Array.isArray(one.content)) {
      one.content = one.content.map((each) =>
        each.type === "image_url" ? { type: "image_url", image_url: { url: "data:image/png;base64,..." } } : each);
    }
  }
  const json = JSON.stringify(body, null, 2);
  const quoted = json.replaceAll("'", "'\\''");
  part("curl").textContent =
    `curl -N ${location.origin}/v1/chat/completions \\\n` +
    `  -H "authorization: Bearer $KVMIG_API_KEY" \\\n` +
    `  -H 'content-type: application/json' \\\n  -d '${quoted}'`;
  const { stream, ...rest } = body;
  part("python").textContent =
    "import os\nfrom openai import OpenAI\n\n" +
    `client = OpenAI(base_url="${location.origin}/v1", api_key=os.environ["KVMIG_API_KEY"])\n` +
    `call = ${python(rest)}\n` +
    "for chunk in client.chat.completions.create(**call, stream=True):\n" +
    "    if chunk.choices and chunk.choices[0].delta.content:\n" +
    '        print(chunk.choices[0].delta.content, end="", flush=True)\n';
}

// JSON's strings and numbers are Python's, too.
function python(value, indent = "") {
  const words = { true: "True", false: "False", null: "None" };
  if (value === null || typeof value !== "object") {
    const json = JSON.stringify(value);
    return words[json] ?? json;
  }
  const inner = `${indent}    `;
  const rows = Array.isArray(value)
    ? value.map((one) => inner + python(one, inner))
    : Object.entries(value).map(([name, one]) => `${inner}${JSON.stringify(name)}: ${python(one, inner)}`);
  const [open, shut] = Array.isArray(value) ? "[]" : "{}";
  return rows.length ? `${open}\n${rows.join(",\n")},\n${indent}${shut}` : open + shut;
}

// -- the start

async function listModels() {
  const came = await fetch(`${ui}/v1/models`);
  if (!came.ok) throw new Error(await refusal(came));
  const rows = (await came.json()).data;
  const wanted = new URLSearchParams(location.search).get("model");
  for (const one of rows) {
    const state = one.kvmig?.state ?? "ready";
    const choice = element("option", state === "ready" ? one.id : `${one.id} (${state})`);
    choice.value = one.id;
    choice.selected = one.id === wanted;
    model.append(choice);
  }
  send.disabled = !rows.length;
  if (!rows.length) complain("There is no model that your key may use.");
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
stop.addEventListener("click", () => running?.stopper?.abort());
move?.addEventListener("click", moveStream);
clear.addEventListener("click", () => {
  if (running) return;
  messages.length = 0;
  asked = [];
  log.replaceChildren();
  complain("");
  showCode();
  text.focus();
});
page.addEventListener("input", showCode);
for (const button of page.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(part(button.dataset.copy).textContent);
    said.textContent = "copied";
  });
}
form.hidden = false;
try {
  await listModels();
} catch (error) {
  complain(error.message);
}
showCode();
