"use strict";
// Shows those gateways that the filters ask for, and opens the one that an address or a place on the map names.

const form = document.getElementById("ask"), matching = document.getElementById("matching");
// The page may have room for fewer than there are.
const whole = Number(document.getElementById("all").dataset.count);
const gateways = [...document.querySelectorAll("details.gateway")];
const marks = new Map([...document.querySelectorAll("#map a")].map((mark) => [mark.hash.slice(1), mark]));
const places = [...document.querySelectorAll("#map .site")];

function filter() {
  const { state, site, version, words } = Object.fromEntries(new FormData(form));
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const each of gateways) {
    const told = each.dataset, text = told.words;
    const fits = (!state || told.state === state) && (!site || told.site === site) && (!version || told.version === version)
      && wanted.every((word) => text.includes(word));
    each.hidden = !fits;
    const mark = marks.get(each.id);
    if (mark) mark.hidden = !fits;
    count += fits;
  }
  for (const each of places) each.hidden = ![...each.querySelectorAll("a")].some((mark) => !mark.hidden);
  matching.textContent = count === whole ? `All ${count} are shown.` : `${count} of ${whole} are shown.`;
}

function open() {
  const named = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!named || !named.matches("details.gateway")) return;
  if (named.hidden) form.reset();
  filter();
  named.open = true;
  named.querySelector("summary").focus();
  named.scrollIntoView({ block: "start" });
}

form.hidden = false;
form.addEventListener("input", filter);
form.addEventListener("reset", () => setTimeout(filter));
form.addEventListener("submit", (event) => event.preventDefault());
addEventListener("hashchange", open);
addEventListener("beforeprint", () => { const more = document.getElementById("more"); if (more) more.open = true; });
filter();
open();
