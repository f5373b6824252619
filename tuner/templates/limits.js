// The choice under a deadline and an energy budget, among the points of the front. The rule is that
// of `tuner choose`: least energy under a deadline alone, least time under a budget, the knee under
// neither; where nothing fits, the point whose larger overshoot is least.
(() => {
  const part = document.getElementById("limits");
  if (!part) return;
  const data = JSON.parse(document.getElementById("limit-points").textContent);
  const names = ["deadline", "budget"];
  const limits = { deadline: data.deadline.limit, budget: data.budget.limit };
  const slider = (name) => document.getElementById(`limit-${name}`);

  const least = (points, ...keys) =>
    points.reduce((best, point) => {
      const key = keys.find((each) => each(point) !== each(best));
      return key && key(point) < key(best) ? point : best;
    });
  const time = (point) => point.time;
  const energy = (point) => point.energy;

  const choose = ({ deadline, budget }) => {
    if (deadline === null && budget === null) return [data.points[data.unlimited], true];
    const worst = (point) =>
      Math.max(
        deadline === null ? -Infinity : point.time / deadline - 1,
        budget === null ? -Infinity : point.energy / budget - 1,
      );
    const fits = data.points.filter((point) => worst(point) <= 0);
    if (!fits.length) return [least(data.points, worst, time), false];
    return [budget === null ? least(fits, energy, time) : least(fits, time, energy), true];
  };

  // Positions are even steps of the limit's logarithm; the last one is no limit. Three digits, so
  // that the limit is the figure that is shown.
  const limitAt = (name) => {
    const { low, high } = data[name];
    const position = Number(slider(name).value);
    const last = Number(slider(name).max);
    if (position === last) return null;
    return Number((low * (high / low) ** (position / (last - 1))).toPrecision(3));
  };
  const positionOf = (name, limit) => {
    const { low, high } = data[name];
    const last = Number(slider(name).max);
    if (limit === null) return last;
    const share = Math.log(limit / low) / Math.log(high / low);
    return Math.round(Math.min(Math.max(share, 0), 1) * (last - 1));
  };

  const text = (name) => {
    if (limits[name] === null) return "no limit";
    const digits = limits[name].toPrecision(3);
    const shown = digits.includes("e") || !digits.includes(".") ? Number(digits) : digits;
    return `${shown.toLocaleString("en")} ${data[name].unit}`;
  };

  const show = (moved) => {
    const [point, met] = choose(limits);
    const given = names.filter((name) => limits[name] !== null);
    const asked = given.map(text).join(" and ");
    let lead = given.length ? `Within ${asked}: ` : "Without limits, the knee of the front: ";
    if (!met) lead = `Nothing ${data.found} trains within ${asked}. Nearest: `;
    const digits = (name) => Number(limits[name].toPrecision(6)); // the run's own may have more
    const options = given.map((name) => ` --${name} ${digits(name)}${data[name].option}`);
    document.getElementById("limits-choice").textContent = `${lead}${point.text}`;
    document.getElementById("limits-command").textContent =
      `tuner choose ${data.run}${options.join("")}`;
    part.classList.toggle("unmet", !met);
    for (const name of names) {
      document.getElementById(`limit-${name}-value`).textContent = text(name);
      slider(name).setAttribute("aria-valuetext", text(name));
    }
    part.choice = { ...limits, name: point.name, time: point.time, energy: point.energy, met };
    if (!moved) return;
    part.moved = true;
    document.dispatchEvent(new Event("limits"));
  };

  for (const name of names) {
    slider(name).value = positionOf(name, limits[name]);
    slider(name).addEventListener("input", () => {
      limits[name] = limitAt(name);
      show(true);
    });
  }
  part.hidden = false;
  show(false);
})();
