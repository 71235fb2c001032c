// The page of `onnxgrad pack`: trains the model in this folder on the data in it. index.html?provider=webgpu uses the GPU.
import { matches } from './matches.mjs';
import { Trainer } from './trainer.mjs';

const at = (id) => document.getElementById(id);
const read = async (name) => {
  const response = await fetch(name);
  if (!response.ok) throw new Error(`${name}: ${response.status} ${response.statusText}`);
  return new Uint8Array(await response.arrayBuffer());
};
const tell = (text) => (at('now').textContent = text);

let trainer, data;

// The samples of these numbers, as tensors.
function batch(part, numbers) {
  const tensors = {};
  for (const [name, { samples, row }] of Object.entries(data[part])) {
    const taken = new samples.constructor(numbers.length * row);
    numbers.forEach((number, i) => taken.set(samples.subarray(number * row, (number + 1) * row), i * row));
    const { type, dims } = trainer.roles.inputs[name];
    tensors[name] = new trainer.ort.Tensor(type, taken, [numbers.length, ...data[part][name].dims.slice(1)]);
  }
  return tensors;
}

// Loss and accuracy on the held-out samples; the accuracy where the model hands out the scores of classes that a loss
// judges. The loss is a mean over samples, or over the labels that count; or a sum.
async function evaluate(size) {
  const { roles, session, held } = trainer;
  const judged = roles.losses.find(({ output, classes }) => classes && roles.outputs[output]?.role === 'kept output');
  const sums = roles.reduction === 'sum';
  const count = Object.values(data.val)[0].dims[0];
  let loss = 0, right = 0, counted = 0, seen = 0;
  for (let start = 0; start + size <= count || (start < count && !fixed()); start += size) {
    const numbers = Array.from({ length: Math.min(size, count - start) }, (_, i) => start + i);
    const feeds = batch('val', numbers);
    const rate = roles.learning_rate ? { [roles.learning_rate]: trainer.tensor(roles.learning_rate, [0], []) } : {};
    const found = await session.run({ ...held, ...feeds, ...rate }, judged ? [roles.loss, judged.output] : [roles.loss]);
    const labels = judged ? matches(found[judged.output], feeds[judged.label], judged) : [];
    const weight = roles.losses.length === 1 && judged ? labels.length : numbers.length;
    if (weight) loss += Number(found[roles.loss].data[0]) * (sums ? 1 : weight);
    seen += weight;
    right += labels.filter(Boolean).length;
    counted += labels.length;
  }
  return `held out: loss ${(sums ? loss : loss / seen).toFixed(3)}` + (counted ? `, ${((100 * right) / counted).toFixed(1)} % right` : '');
}

// The number of samples that the model takes at once; undefined where it takes any.
function fixed() {
  const sizes = Object.keys(data.train).map((name) => trainer.roles.inputs[name].dims[0]);
  return sizes.find((size) => typeof size === 'number');
}

function draw(losses, steps) {
  const top = Math.max(...losses.slice(0, 5));
  const points = losses.map((loss, i) => `${((600 * i) / steps).toFixed(1)},${(200 * (1 - Math.min(loss / top, 1))).toFixed(1)}`);
  at('line').setAttribute('points', points.join(' '));
}

async function train(event) {
  event.preventDefault();
  at('train').disabled = at('save').disabled = true;
  const steps = at('steps').valueAsNumber, size = fixed() ?? at('size').valueAsNumber, rate = at('rate').valueAsNumber;
  const count = Object.values(data.train)[0].dims[0];
  const losses = [];
  const began = performance.now();
  try {
    while (losses.length < steps) {
      const numbers = Array.from({ length: size }, () => Math.floor(Math.random() * count));
      losses.push(await trainer.step(batch('train', numbers), rate));
      if (losses.length % 20 === 0 || losses.length === steps) {
        draw(losses, steps);
        tell(`step ${losses.length}: loss ${losses.at(-1).toFixed(3)}`);
        await new Promise((next) => setTimeout(next)); // the page stays alive
      }
    }
    const each = (performance.now() - began) / steps;
    tell(`step ${steps}: loss ${losses.at(-1).toFixed(3)}, ${each.toFixed(1)} ms a step` + (data.val ? `; ${await evaluate(size)}` : ''));
  } catch (error) {
    tell(String(error));
  }
  at('train').disabled = at('save').disabled = false;
}

function save() {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([trainer.save()]));
  link.download = 'trained.bin'; // onnxgrad export trained.bin --roles model.json --model MODEL
  link.click();
  URL.revokeObjectURL(link.href);
}

async function open() {
  const provider = new URLSearchParams(location.search).get('provider') ?? 'wasm';
  const ort = await import(`./ort/ort.${provider}.min.mjs`);
  ort.env.wasm.wasmPaths = new URL('ort/', import.meta.url).href;
  ort.env.wasm.numThreads = globalThis.crossOriginIsolated ? 0 : 1; // 0: as many as there are
  trainer = await Trainer.open(ort, read, 'model.json', { executionProviders: [provider] });
  const said = JSON.parse(new TextDecoder().decode(await read('data.json')));
  const { buffer } = await read('data.bin');
  data = Object.fromEntries(Object.entries(said).map(([part, arrays]) => [part, Object.fromEntries(
    Object.entries(arrays).map(([name, { array, dims, offset, size }]) =>
      [name, { dims, row: size / dims[0], samples: new globalThis[array](buffer, offset, size) }]))]));
  if (fixed()) at('size').value = fixed();
  tell(data.val ? `Before training, ${await evaluate(fixed() ?? 32)}` : 'Ready.');
  at('train').disabled = at('save').disabled = false;
  at('form').addEventListener('submit', train);
  at('save').addEventListener('click', save);
}

open().catch((error) => tell(`The model can't be opened: ${error.message}`));
