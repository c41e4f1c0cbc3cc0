// Refreshes the live parts of a page while it is visible.
"use strict";

const pause = 1000 * Number(document.body.dataset.live);

async function refresh() {
  const answer = await fetch(location.href, { cache: "no-store" });
  if (answer.redirected) {
    location.reload(); // the session has expired
    return;
  }
  if (!answer.ok) {
    return;
  }
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of document.querySelectorAll("[data-part]")) {
    const successor = fresh.getElementById(part.id);
    if (successor === null || successor.innerHTML === part.innerHTML) {
      continue;
    }
    const focused = focusedIn(part);
    const scrolled = [...part.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
    part.innerHTML = successor.innerHTML;
    part.toggleAttribute("data-ended", successor.hasAttribute("data-ended"));
    part.querySelectorAll(".scroll").forEach((box, i) => { box.scrollLeft = scrolled[i] ?? 0; });
    focusables(part)[focused]?.focus({ preventScroll: true });
  }
}

function focusables(part) {
  return [...part.querySelectorAll("a, button, summary, [tabindex]")];
}

function focusedIn(part) {
  return focusables(part).indexOf(document.activeElement);
}

async function watch() {
  while (document.querySelector("[data-part]:not([data-ended])") !== null) {
    await new Promise((resolve) => setTimeout(resolve, pause));
    if (document.visibilityState === "visible") {
      await refresh().catch(() => undefined); // the daemon may be restarting: retry
    }
  }
}

watch();
