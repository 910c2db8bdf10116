"use strict";
// On a phone what is long is folded until it is asked for; paper and wide screens show all of it.
{
  const phone = matchMedia("(max-width: 40rem)");
  const fold = (open) => { for (const part of document.querySelectorAll("details.fold")) part.open = open; };
  phone.addEventListener("change", () => fold(!phone.matches));
  addEventListener("beforeprint", () => fold(true));
  fold(!phone.matches);
}

// Each chart holds its stops as JSON: [place, heading, [[colour class, name, value], ...]].
for (const chart of document.querySelectorAll(".chart")) {
  const svg = chart.querySelector("svg"), cursor = chart.querySelector(".cursor"), tip = chart.querySelector(".tip");
  const { along, stops } = JSON.parse(chart.querySelector("script").textContent);
  if (!stops.length) continue;
  const box = svg.viewBox.baseVal;
  let shown = -1;

  const show = (index) => {
    shown = Math.max(0, Math.min(stops.length - 1, index));
    const [place, heading, rows] = stops[shown];
    cursor.setAttribute(along + "1", place);
    cursor.setAttribute(along + "2", place);
    const head = document.createElement("b");
    head.textContent = heading;
    const table = document.createElement("table");
    for (const [colour, name, value] of rows) {
      const row = table.insertRow(), label = row.insertCell(), dot = document.createElement("i");
      row.className = colour;
      label.append(dot, name);
      row.insertCell().textContent = value;
    }
    tip.replaceChildren(head, table);
    tip.hidden = false;
    chart.classList.add("on");
    const scale = svg.clientWidth / box.width, room = chart.clientWidth - tip.offsetWidth;
    if (along === "x") {
      const at = place * scale, right = at + 12;
      tip.style.left = Math.max(0, right <= room ? right : Math.min(room, at - 12 - tip.offsetWidth)) + "px";
      tip.style.top = Math.max(0, 12 * scale) + "px";
    } else {
      tip.style.left = Math.max(0, room) + "px";
      tip.style.top = place * scale + 14 + "px";
    }
  };
  const hide = () => { shown = -1; tip.hidden = true; chart.classList.remove("on"); };
  const nearest = (event) => {
    const frame = svg.getBoundingClientRect();
    const place = along === "x"
      ? (event.clientX - frame.left) / frame.width * box.width
      : (event.clientY - frame.top) / frame.height * box.height;
    let best = 0;
    stops.forEach((stop, index) => { if (Math.abs(stop[0] - place) < Math.abs(stops[best][0] - place)) best = index; });
    return best;
  };

  svg.addEventListener("pointermove", (event) => show(nearest(event)));
  svg.addEventListener("pointerdown", (event) => show(nearest(event)));
  svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
  svg.addEventListener("focus", () => { if (shown < 0 && svg.matches(":focus-visible")) show(0); });
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 };
    if (event.key in moves) show(shown + moves[event.key]);
    else if (event.key === "Home") show(0);
    else if (event.key === "End") show(stops.length - 1);
    else if (event.key === "Escape") hide();
    else return;
    event.preventDefault();
  });
}
