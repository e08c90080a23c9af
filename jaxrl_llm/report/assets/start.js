// Draws the page: the small sections first, the rollout browser after the first frame.
async function start() {
  const runs = [];
  for (let number = 0; number < RUNS; number++) runs.push(JSON.parse(await unpack(`run${number}`)));
  drawHeader(runs);
  for (const draw of [
    drawResult,
    drawLearning,
    drawDistributions,
    drawPolicy,
    drawCurriculum,
    drawTime,
    drawDevice,
    drawHealth,
    drawConfig,
  ])
    draw(runs);
  await new Promise(resolve => requestAnimationFrame(resolve));
  await drawRollouts(runs);
  document.documentElement.dataset.ready = '1';
}
start().catch(error => {
  const box = byId('error');
  box.hidden = false;
  box.textContent =
    typeof DecompressionStream === 'undefined'
      ? 'This browser has no DecompressionStream, which this page needs; use a browser of 2023 or later.'
      : `The page could not be drawn: ${error.message}`;
  console.error(error);
});
