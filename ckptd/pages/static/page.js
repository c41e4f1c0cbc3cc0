// The choice of light or dark, buttons that copy, costs, and keys. Pages are complete without it.
"use strict";

const THEME = "ckptd-theme";
const PRICE = "ckptd-price";

function stored(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null; // storage is blocked
  }
}

function keep(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // the choice lasts for this page
  }
}

function isDark() {
  return (document.documentElement.dataset.theme ?? systemTheme()) === "dark";
}

function systemTheme() {
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

// Before the first paint.
if (["light", "dark"].includes(stored(THEME))) {
  document.documentElement.dataset.theme = stored(THEME);
}

function offerThemes() {
  const button = document.getElementById("theme");
  const label = () => {
    button.querySelector("span").textContent = isDark() ? "Light" : "Dark";
    button.title = isDark() ? "Light colors" : "Dark colors";
  };
  button.addEventListener("click", () => {
    const wanted = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = wanted;
    keep(THEME, wanted);
    label();
  });
  label();
  button.hidden = false;
}

async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = document.createElement("textarea"); // http:// pages have no clipboard object
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

function offerCopies() {
  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      await copy(document.getElementById(button.dataset.copy).textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }
}

function offerCosts() {
  const form = document.getElementById("cost");
  if (form === null) {
    return;
  }
  const price = form.querySelector("input");
  const digits = new Intl.NumberFormat(undefined, { maximumSignificantDigits: 3 });
  const show = () => {
    document.querySelectorAll(".cost").forEach((one) => { one.hidden = !(Number(price.value) > 0); });
    for (const one of document.querySelectorAll("[data-bytes]")) {
      one.textContent = digits.format(Number(price.value) * Number(one.dataset.bytes) / 1e9);
    }
  };
  price.value = stored(PRICE) ?? "";
  price.addEventListener("input", () => {
    keep(PRICE, price.value);
    show();
  });
  show();
  form.hidden = false;
}

const KEYS = { "/": "input[name=q]", n: "a[rel=next]", p: "a[rel=prev]" };

function offerKeys() {
  document.addEventListener("keydown", (event) => {
    const elsewhere = event.target.closest("input, select, textarea") || event.altKey || event.ctrlKey || event.metaKey;
    const found = elsewhere ? null : document.querySelector(KEYS[event.key] ?? "#none");
    if (found === null) {
      return;
    }
    event.preventDefault();
    if (found.tagName === "A") {
      found.click();
    } else {
      found.focus();
      found.select();
    }
  });
}

document.addEventListener("DOMContentLoaded", () => {
  offerKeys();
  offerThemes();
  offerCopies();
  offerCosts();
});
