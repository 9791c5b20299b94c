// Where the page is narrow, the list of curves stands below them, and the plot has the whole width.
const narrow = matchMedia("(max-width: 700px)");
const beside = {
  "legend.x": 1.01, "legend.y": 1, "legend.yanchor": "top", "margin.l": 64, "margin.r": 24, "margin.b": 48,
  height: 440, width: null,
};
function fit() {
  for (const plot of document.querySelectorAll('.js-plotly-plot[id^="curves-"]')) {
    const list = 24 * plot.data.filter((trace) => trace.showlegend !== false).length;
    const below = {
      "legend.x": 0, "legend.y": -60 / 260, "legend.yanchor": "top", "margin.l": 48, "margin.r": 8, "margin.b": 60 + list,
      height: 352 + list, width: plot.parentElement.clientWidth,
    };
    const wanted = narrow.matches ? below : beside;
    plot.parentElement.style.height = `${wanted.height}px`;
    Plotly.relayout(plot, wanted);
  }
}
window.addEventListener("load", fit);
window.addEventListener("resize", fit);
