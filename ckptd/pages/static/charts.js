// A cross-hair on plots, under the pointer or moved by arrow keys; it marks the same checkpoint in all plots of a page.
// Pages are complete without it.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

class PlotCross {
  constructor(box) {
    this.box = box;
    this.svg = box.querySelector("svg");
    this.lines = [...box.querySelectorAll("[data-line]")].map((line) => ({
      kind: line.dataset.line,
      marks: [...line.querySelectorAll("circle")].map(marked),
    })).filter((line) => line.marks.length > 0);
    this.rule = document.createElementNS(SVG, "line");
    this.rule.setAttribute("class", "cross");
    this.rule.setAttribute("y1", this.svg.dataset.top);
    this.rule.setAttribute("y2", this.svg.dataset.bottom);
    this.readout = document.createElement("div");
    this.readout.className = "readout";
    this.readout.setAttribute("role", "status");
    box.append(this.readout);
    this.hide();
  }

  hide() {
    this.at = null;
    this.rule.remove();
    this.readout.hidden = true;
    this.svg.querySelectorAll(".picked").forEach((mark) => mark.classList.remove("picked"));
  }

  // The mark of the first line that is closest to a place on the screen.
  under(clientX) {
    const edges = this.svg.getBoundingClientRect();
    const x = (clientX - edges.left) * this.svg.viewBox.baseVal.width / edges.width;
    return closest(this.lines[0].marks, x);
  }

  show(mark) {
    this.hide();
    this.at = mark;
    this.rule.setAttribute("x1", mark.x);
    this.rule.setAttribute("x2", mark.x);
    this.svg.prepend(this.rule);
    const [head] = parted(mark.title);
    const rows = this.lines.map((line, i) => {
      const found = i === 0 ? mark : closest(line.marks, mark.x);
      found.circle.classList.add("picked");
      const [step, text] = parted(found.title);
      return row(line.kind, step === head ? text : `${text} at ${step}`);
    });
    const title = document.createElement("strong");
    title.textContent = head;
    this.readout.replaceChildren(title, ...rows);
    this.readout.hidden = false;
    this.place(mark);
  }

  place(mark) {
    const edges = this.svg.getBoundingClientRect();
    const around = this.box.getBoundingClientRect();
    const x = edges.left - around.left + mark.x * edges.width / this.svg.viewBox.baseVal.width;
    const beside = x + 14 + this.readout.offsetWidth < around.width ? x + 14 : x - 14 - this.readout.offsetWidth;
    this.readout.style.left = `${Math.max(4, beside)}px`;
  }
}

function marked(circle) {
  const title = circle.querySelector("title");
  title.remove(); // the readout has it
  const [x, y] = ["cx", "cy"].map((name) => Number(circle.getAttribute(name)));
  return { circle, x, y, title: title.textContent, link: circle.closest("a")?.getAttribute("href") };
}

function closest(marks, x) {
  return marks.reduce((best, mark) => Math.abs(mark.x - x) < Math.abs(best.x - x) ? mark : best);
}

function parted(title) {
  const at = title.indexOf(": ");
  return at < 0 ? [title, ""] : [title.slice(0, at), title.slice(at + 2)];
}

function row(kind, text) {
  const line = document.createElement("span");
  const swatch = document.createElement("i");
  swatch.className = `swatch ${kind}`;
  line.append(swatch, text);
  return line;
}

function offerCross(cross, all) {
  const marks = cross.lines[0].marks;
  const show = (mark) => {
    cross.show(mark);
    for (const other of all.filter((one) => one !== cross)) {
      const same = other.lines[0].marks.find((one) => one.link && one.link === mark.link);
      same ? other.show(same) : other.hide();
    }
  };
  const hide = () => all.forEach((one) => one.hide());
  cross.svg.addEventListener("pointermove", (event) => show(cross.under(event.clientX)));
  cross.svg.addEventListener("pointerdown", (event) => show(cross.under(event.clientX)));
  cross.svg.addEventListener("pointerleave", hide);
  const region = cross.box.querySelector("[tabindex]");
  region.addEventListener("blur", hide);
  region.addEventListener("keydown", (event) => {
    const at = marks.indexOf(cross.at);
    const last = marks.length - 1;
    const next = { ArrowLeft: at < 0 ? last : at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") {
      hide();
    } else if (event.key === "Enter" && cross.at?.link) {
      location.assign(cross.at.link);
    } else if (next !== undefined && !event.altKey && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      show(marks[Math.min(last, Math.max(0, next))]);
      cross.at.circle.scrollIntoView({ block: "nearest", inline: "nearest", behavior: "instant" });
      cross.place(cross.at);
    }
  });
}

const crosses = [...document.querySelectorAll("[data-plot]")]
  .map((box) => new PlotCross(box))
  .filter((cross) => cross.lines.length > 0);
crosses.forEach((cross) => offerCross(cross, crosses));
