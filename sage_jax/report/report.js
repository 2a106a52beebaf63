"use strict";
// Fills the skill library and the episode viewer. Texts of models and worlds only ever become text nodes.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);

  function el(tag, className, ...children) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    for (const child of children) if (child !== null && child !== undefined) node.append(child);
    return node;
  }
  const badge = (text, kind) => el("span", "badge " + (kind || ""), String(text));
  const outcome = (e) => (!e.valid ? "invalid" : e.s ? "solved" : "failed");
  const number = (x) => (Number.isInteger(x) ? String(x) : x.toFixed(2));

  function skillNode(id, extra) {
    const skill = data.skills[id];
    if (!skill) return el("div", "mono", id);
    const summary = el("summary", "", el("code", "grow", skill.signature), ...(extra || []), el("small", "mono", skill.id));
    const node = el("details", "skill", summary);
    node.addEventListener("toggle", () => {
      if (!node.open || node.children.length > 1) return;
      const o = skill.origin;
      const facts = [`from ${o.task_id}, position ${o.position}, turn ${o.turn + 1}, ${o.rollout}`, `version ${skill.version}`];
      if (skill.parents.length) facts.push("revises " + skill.parents.join(", "));
      if (skill.withdrawn) facts.push("withdrawn");
      node.append(el("div", "note", facts.join(" · ")), el("pre", "", skill.code));
    });
    return node;
  }

  function skillGroup(title, ids) {
    return ids.length ? [el("h3", "", `${title} (${ids.length})`), ...ids.map((id) => skillNode(id))] : [];
  }

  function showLibrary() {
    const target = byId("skills");
    if (!data.library.length) target.append(el("p", "note", "No skills were kept."));
    for (const s of data.library) {
      const kind = s.successes ? "good" : "";
      target.append(skillNode(s.id, [badge(`${s.uses} uses`, kind), badge(`${s.successes} successes`, kind), el("small", "", "from " + data.skills[s.id].origin.task_id)]));
    }
  }

  // The response as sampled, the part that was executed set off.
  function responseNode(turn) {
    if (Array.isArray(turn.code)) {
      const [from, to] = turn.code;
      const text = turn.response;
      const after = text.slice(to).replace(/^\n/, ""); // the code is a block of its own and ends its line by itself
      return el("pre", "", el("span", "said", text.slice(0, from)), el("span", "ran", text.slice(from, to)), el("span", "said", after));
    }
    return el("pre", "", el("span", "said", turn.response));
  }

  function turnNode(turn, n) {
    const badges = el("div", "badges", badge(`${turn.generated} tokens`), badge("ended by " + turn.finish));
    if (turn.failed) badges.append(badge(turn.limit ? "hit the limit: " + turn.limit : "failed", "bad"));
    if (turn.completed) badges.append(badge("task completed", "good"));
    for (const id of turn.skill_calls) badges.append(badge("called " + id, "good"));
    if (turn.dropped) badges.append(badge(`${turn.dropped} characters dropped`, "warn"));
    const time = `${number(turn.seconds_policy)} s policy, ${number(turn.seconds_world)} s world`;
    const body = el("div", "body", el("div", "role", "response"), responseNode(turn));
    if (turn.code === null) body.append(el("div", "note", "No code was run."));
    if (typeof turn.code === "string") body.append(el("div", "role", "code"), el("pre", "ran", turn.code));
    body.append(el("div", "role", "observation"), el("pre", "observation" + (turn.failed ? " failed" : ""), turn.observation));
    return el("div", "turn", el("div", "bar", el("b", "", `Turn ${n + 1}`), badges, el("small", "", time)), body);
  }

  function showEpisode(index) {
    const e = data.episodes[index];
    const target = byId("episode");
    target.replaceChildren();
    const kinds = { solved: "good", failed: "bad", invalid: "warn" };
    const o = outcome(e);
    const badges = el("div", "badges", badge(o === "invalid" ? "no sample" : o, kinds[o]), badge("end: " + e.end, e.end === "completed" ? "" : "warn"), badge(`reward r = ${number(e.r)}`), badge(`success s = ${e.s}`));
    badges.append(badge(e.judged ? `${e.judged.passed} of ${e.judged.total} tests passed` : "not scored"));
    badges.append(badge(`${e.turns.length} turns`), badge(`${e.generated} tokens`), badge(`${number(e.seconds)} s`));
    if (e.called.length) badges.append(badge(`${e.called.length} skills called`, "good"));
    target.append(el("h3", "", e.task), el("small", "", `${e.arm} · ${e.split} · difficulty ${e.difficulty} · position ${e.position} · ${e.rollout}`), badges);
    target.append(el("div", "instruction", e.instruction));
    if (e.error) target.append(el("h3", "", "Error"), el("pre", "", e.error));
    if (e.judged) {
      const list = el("ul", "tests", ...e.judged.passes.map((t) => el("li", "pass", t)), ...e.judged.failures.map((t) => el("li", "fail", t)));
      target.append(el("h3", "", "Tests"), list);
      if (!e.judged.completed) target.append(el("div", "note", "The task was not completed, so the reward is 0 whatever the tests say."));
    }
    target.append(...skillGroup("Skills offered", e.offered), ...skillGroup("Skills called", e.called), ...skillGroup("Skills defined", e.defined));
    for (const [id, reason] of e.refused) target.append(el("div", "note", `not installed: ${id}: ${reason}`));
    const prompt = el("details", "", el("summary", "", `Prompt (${e.opening.length} messages)`));
    for (const [role, text] of e.opening) prompt.append(el("div", "role", role), el("pre", "", data.texts[text]));
    target.append(el("h3", "", "Conversation"), prompt, ...e.turns.map(turnNode));
  }

  // Filters: one select a field, and words to look for.
  const shown = { list: [], current: -1 };
  const FIELDS = [
    ["arm", (e) => e.arm], ["split", (e) => e.split], ["outcome", outcome], ["end", (e) => e.end], ["difficulty", (e) => String(e.difficulty)],
    ["position", (e) => String(e.position)], ["skills", (e) => (e.called.length ? "called" : e.offered.length ? "offered, not called" : "none offered")],
  ];
  const selects = [];
  const words = el("input");
  words.type = "search";
  words.placeholder = "task, instruction, code …";
  const count = el("small");

  function haystack(e) {
    return [e.task, e.instruction, e.rollout, ...e.turns.map((t) => t.response)].join("\n").toLowerCase();
  }

  function showList() {
    const list = byId("list");
    const wanted = words.value.trim().toLowerCase();
    list.replaceChildren();
    shown.list = [];
    data.episodes.forEach((e, i) => {
      if (selects.some(([select, value]) => select.value && value(e) !== select.value)) return;
      if (wanted && !haystack(e).includes(wanted)) return;
      shown.list.push(i);
      const score = e.judged ? `${e.judged.passed}/${e.judged.total}` : "–";
      const button = el("button", outcome(e), el("div", "line", el("span", "mono", e.task), el("small", "", `${e.arm} · ${e.end} · ${score}${e.called.length ? " · skill" : ""}`)), el("div", "text", e.instruction));
      button.dataset.index = i;
      button.addEventListener("click", () => choose(i));
      list.append(button);
    });
    count.textContent = `${shown.list.length} of ${data.episodes.length}`;
    if (shown.list.includes(shown.current)) mark();
    else if (shown.list.length) choose(shown.list[0], true);
    else byId("episode").replaceChildren(el("p", "note", data.episodes.length ? "No episode fits the filters." : "No episodes were kept."));
  }

  function mark() {
    const list = byId("list");
    for (const b of list.children) {
      b.classList.toggle("current", Number(b.dataset.index) === shown.current);
      if (!b.classList.contains("current")) continue;
      // Only the list scrolls, never the page.
      if (b.offsetTop < list.scrollTop) list.scrollTop = b.offsetTop;
      const below = b.offsetTop + b.offsetHeight - list.clientHeight;
      if (below > list.scrollTop) list.scrollTop = below;
    }
  }

  function choose(index, quiet) {
    shown.current = index;
    showEpisode(index);
    mark();
    if (!quiet) history.replaceState(null, "", "#episode-" + index);
  }

  function showFilters() {
    const target = byId("filters");
    for (const [name, value] of FIELDS) {
      const values = [...new Set(data.episodes.map(value))].sort();
      if (values.length < 2) continue;
      const select = el("select", "", ...["", ...values].map((v) => { const option = el("option", "", v || "all"); option.value = v; return option; }));
      select.addEventListener("change", showList);
      selects.push([select, value]);
      target.append(el("label", "", name, select));
    }
    words.addEventListener("input", showList);
    target.append(words, count);
  }

  byId("list").addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const place = shown.list.indexOf(shown.current) + step;
    if (!step || place < 0 || place >= shown.list.length) return;
    event.preventDefault();
    choose(shown.list[place]);
  });

  function fromHash() {
    const found = /^#episode-(\d+)$/.exec(location.hash);
    if (found && Number(found[1]) < data.episodes.length) {
      choose(Number(found[1]), true);
      byId("episodes").scrollIntoView();
    }
  }
  window.addEventListener("hashchange", fromHash);

  showLibrary();
  showFilters();
  showList();
  fromHash();
})();
