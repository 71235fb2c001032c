// Trains digits_cnn on digits drawn here and on those in the folder of `onnxgrad pack` beside which it stands.
import { Trainer } from './trainer.mjs';
import * as ort from './ort/ort.wasm.min.mjs';

const at = (id) => document.getElementById(id), tell = (text) => (at('now').textContent = text);
const read = async (name) => new Uint8Array(await (await fetch(name)).arrayBuffer());
ort.env.wasm.wasmPaths = new URL('ort/', import.meta.url).href;
ort.env.wasm.numThreads = globalThis.crossOriginIsolated ? 0 : 1; // 0: as many as there are
const trainer = await Trainer.open(ort, read, 'model.json').catch((error) => { tell(String(error)); throw error; });
const said = JSON.parse(new TextDecoder().decode(await read('data.json'))), { buffer } = await read('data.bin');
const samples = ({ x, y }) => Array.from(new BigInt64Array(buffer, y.offset, y.size), (label, i) =>
  ({ label: Number(label), image: new Float32Array(buffer, x.offset + i * 256, 64) }));
const given = samples(said.train), heldOut = samples(said.val), own = [];

// The drawing is a sample's image: ink from 0 to 1, fainter on pixels beside the pen.
const image = new Float32Array(64), pen = { x: 3.5, y: 0.5 }, context = at('pad').getContext('2d');
function ink(x, y) {
  image.forEach((old, i) => (image[i] = Math.max(old, Math.min(1, 1.3 - Math.hypot((i % 8) + 0.5 - x, (i >> 3) + 0.5 - y)))));
  show();
}
function show() {
  const pixels = Uint8ClampedArray.from({ length: 256 }, (_, i) => (i % 4 === 3 ? 255 : 255 * (1 - image[i >> 2])));
  context.putImageData(new ImageData(pixels, 8, 8), 0, 0);
}
const clear = () => (image.fill(0), show());
const draw = ({ buttons, offsetX, offsetY, target }) =>
  buttons && ink((8 * offsetX) / target.clientWidth, (8 * offsetY) / target.clientHeight);
function key(event) {
  const [x, y] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], ' ': [0, 0] }[event.key] ?? [];
  if (x === undefined) return;
  event.preventDefault();
  Object.assign(pen, { x: Math.min(Math.max(pen.x + x, 0.5), 7.5), y: Math.min(Math.max(pen.y + y, 0.5), 7.5) });
  if (event.key === ' ') ink(pen.x, pen.y);
  else (show(), (context.fillStyle = '#0550ae'), context.fillRect(pen.x - 0.5, pen.y - 0.5, 1, 1)); // where the pen is
}

const batch = (taken) => ({
  x: trainer.tensor('x', taken.flatMap(({ image }) => [...image]), [taken.length, 1, 8, 8]),
  y: trainer.tensor('y', taken.map(({ label }) => label), [taken.length]),
});
async function right(asked) {
  if (!asked.length) return 'none yet';
  const feeds = { ...trainer.held, ...batch(asked), learning_rate: trainer.tensor('learning_rate', [0], []) };
  const { data } = (await trainer.session.run(feeds, ['logits'])).logits;
  const best = (i) => { const scores = data.subarray(10 * i, 10 * i + 10); return scores.indexOf(Math.max(...scores)); };
  return `${((100 * asked.filter(({ label }, i) => best(i) === label).length) / asked.length).toFixed(1)} % right`;
}
const accuracy = async () => `my ${own.length} digits: ${await right(own)}; held out: ${await right(heldOut)}`;
const free = (yes) => ['add', 'train', 'save'].forEach((id) => (at(id).disabled = !yes));

async function busy(work) {
  free(false);
  await work().catch((error) => tell(String(error)));
  free(true);
}
const train = () => busy(async () => {
  const before = await accuracy(), any = (from) => from[Math.floor(Math.random() * from.length)];
  for (let step = 1; step <= 400; step++) { // of each batch a quarter is drawn here
    const loss = await trainer.step(batch(Array.from({ length: 32 }, (_, i) => any(own.length && i < 8 ? own : given))), 0.005);
    if (step % 20 === 0) (tell(`step ${step}: loss ${loss.toFixed(3)}`), await new Promise((next) => setTimeout(next)));
  }
  tell(`Before, ${before}. After, ${await accuracy()}.`);
});
const add = () => busy(async () => {
  if (!image.some((ink) => ink > 0)) return void tell('Draw a digit first.');
  own.push({ label: at('digit').valueAsNumber, image: image.slice() });
  clear();
  tell(`Before, ${await accuracy()}.`);
});
function save() { // onnxgrad export trained.bin --roles model.json --model digits_cnn.onnx
  const link = Object.assign(document.createElement('a'), { download: 'trained.bin' });
  link.href = URL.createObjectURL(new Blob([trainer.save()]));
  link.click();
  URL.revokeObjectURL(link.href);
}

for (const kind of ['pointerdown', 'pointermove']) at('pad').addEventListener(kind, draw);
at('pad').addEventListener('keydown', key);
at('form').addEventListener('submit', (event) => (event.preventDefault(), add()));
for (const [id, does] of Object.entries({ clear, train, save })) at(id).addEventListener('click', does);
clear();
busy(async () => tell(`Before, ${await accuracy()}.`));
