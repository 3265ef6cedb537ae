for (const head of document.querySelectorAll("th")) {
  head.addEventListener("click", () => {
    const body = head.closest("table").tBodies[0];
    const column = head.cellIndex;
    const down = head.dataset.down !== "yes";
    head.dataset.down = down ? "yes" : "no";
    const value = (row) => column < 6 ? row.cells[column].textContent.replace(/\s/g, "") : row.cells[column].textContent;
    const order = (a, b) => {
      const [x, y] = [value(a), value(b)];
      const difference = column < 6 ? (parseFloat(x) || 0) - (parseFloat(y) || 0) : y.localeCompare(x);
      return down ? -difference : difference;
    };
    body.append(...[...body.rows].sort(order));
  });
}
