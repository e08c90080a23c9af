// The page as a whole: what is small is drawn first, the rollouts' index after the first picture.
async function start() {
  const runs = [];
  for (let at = 0; at < RUNS; at++) runs.push(JSON.parse(await unpack(`run${at}`)));
  drawHeader(runs);
  for (const draw of [drawHealth, drawLearning, drawDistributions, drawPolicy, drawCurriculum, drawTime, drawDevice, drawConfig])
    draw(runs);
  await new Promise(done => requestAnimationFrame(done));
  await drawRollouts(runs);
  document.documentElement.dataset.ready = '1';
}
start().catch(error => {
  const box = byId('trouble');
  box.hidden = false;
  box.textContent =
    typeof DecompressionStream === 'undefined'
      ? 'This browser cannot unpack what lies in the page (no DecompressionStream); any of 2023 or later can.'
      : `The page could not be drawn: ${error.message}`;
  console.error(error);
});
