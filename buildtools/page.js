"use strict";
(() => {
  const find = (id) => document.getElementById(id);
  const data = JSON.parse(find("answers").textContent);
  const selects = [...document.querySelectorAll("#chooser select")];
  const here = new URL(".", location.href).href;
  for (const node of document.querySelectorAll(".index-url")) {
    if (node.textContent === "INDEX/") node.textContent = here;
  }
  for (const node of document.querySelectorAll(".without-script")) node.hidden = true;

  const element = (tag, text = "", name = "") => {
    const made = document.createElement(tag);
    made.textContent = text;
    made.className = name;
    return made;
  };

  const copies = (text) => {
    const box = element("div", "", "command");
    const code = element("pre");
    code.append(element("code", text));
    code.id = "command";
    box.append(code);
    if (navigator.clipboard) {
      const button = element("button", "Copy");
      button.type = "button";
      button.addEventListener("click", async () => {
        try {
          await navigator.clipboard.writeText(text);
          button.textContent = "Copied";
        } catch {
          getSelection().selectAllChildren(code); // to be copied by hand
          button.textContent = "Selected";
        }
        setTimeout(() => { button.textContent = "Copy"; }, 2000);
      });
      box.append(button);
    }
    return box;
  };

  // The wheel's own row of the table says everything: it is copied from there.
  const showWheel = (number, chosen) => {
    const row = find(`wheel-${number}`);
    const before = chosen[0].dataset.before;
    const command = row.querySelector("pre code").textContent;
    const facts = element("dl", "", "facts");
    for (const [name, selector] of data.facts) {
      const value = element("dd");
      value.append(...[...row.querySelectorAll(selector)].map((node) => node.cloneNode(true)));
      facts.append(element("dt", name), value);
    }
    return [element("h3", "Install"), copies((before ? `${before}\n` : "") + command), facts];
  };

  const showNone = ([[nearest], reasons, advice, compiles]) => {
    const list = (texts) => {
      const made = element("ul");
      made.append(...texts.map((number) => element("li", data.texts[number])));
      return made;
    };
    const parts = [element("h3", "None, because …"), element("p"), list(reasons)];
    parts[1].append("The nearest wheel is ", element("code", data.texts[nearest], "file"), ", but:");
    if (advice.length) parts.push(element("p", "What you can do:"), list(advice));
    if (compiles && find("source")) {
      parts.push(element("p", "It compiles from source there, in minutes and without nvcc:"));
      parts.push(copies(`pip install ${find("source").href.split("#")[0]}`));
    }
    return parts;
  };

  const show = () => {
    const chosen = selects.map((select) => select.selectedOptions[0]);
    const place = selects.reduce((sum, select) => sum * select.options.length + select.selectedIndex, 0);
    const answer = data.answers[data.choices[place]];
    const none = Array.isArray(answer);
    const panel = find("answer");
    panel.className = none ? "answer none" : "answer";
    panel.dataset.wheel = none ? "" : answer;
    panel.replaceChildren(...(none ? showNone(answer) : showWheel(answer, chosen)));
  };

  // The choice is a part of the address, so that it can be sent to somebody.
  const restore = () => {
    const wanted = new URLSearchParams(location.hash.slice(1));
    for (const select of selects) {
      const option = [...select.options].find((item) => item.value === wanted.get(select.name));
      if (option) option.selected = true;
    }
    show();
  };
  const remember = () => {
    const chosen = new URLSearchParams(selects.map((select) => [select.name, select.value]));
    try {
      history.replaceState(null, "", `#${chosen}`);
    } catch { /* some browsers do not allow it for a file */ }
    show();
  };
  for (const select of selects) select.addEventListener("change", remember);
  addEventListener("hashchange", restore);
  find("chooser").hidden = false;
  restore();
})();
