// Sliders of a deadline and an energy budget: they look up the choice that is written for each
// pair of values.
(() => {
  const part = document.getElementById("limits");
  if (!part) return;
  const data = JSON.parse(document.getElementById("limit-choices").textContent);
  const names = ["deadline", "budget"];
  const slider = (name) => document.getElementById(`limit-${name}`);

  const show = (moved) => {
    const [row, column] = names.map((name) => Number(slider(name).value));
    const limits = { deadline: data.deadline[row], budget: data.budget[column] };
    const [number, met] = data.cells[row][column];
    const point = data.points[number];
    const given = names.map((name) => limits[name]).filter((limit) => limit.value !== null);
    const asked = given.map((limit) => limit.text).join(" and ");
    let lead = given.length ? `Within ${asked}: ` : "Without limits: ";
    if (!met) lead = `Nothing ${data.found} trains within ${asked}. Nearest: `;
    document.getElementById("limits-choice").textContent = `${lead}${point.text}`;
    document.getElementById("limits-command").textContent =
      `tuner choose ${data.run}${given.map((limit) => limit.option).join("")}`;
    part.classList.toggle("unmet", !met);
    for (const name of names) {
      document.getElementById(`limit-${name}-value`).textContent = limits[name].text;
      slider(name).setAttribute("aria-valuetext", limits[name].text);
    }
    part.choice = {
      deadline: limits.deadline.value,
      budget: limits.budget.value,
      name: point.name,
      time: point.time,
      energy: point.energy,
      met,
    };
    if (!moved) return;
    part.moved = true;
    document.dispatchEvent(new Event("limits"));
  };

  for (const name of names) slider(name).addEventListener("input", () => show(true));
  part.hidden = false;
  show(false);
})();
