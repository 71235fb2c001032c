// Runs the training model of a folder as tests/web/cases.py does, in any runtime of JavaScript.

const STEPS = 4;
const RATE = 0.01;
const SHORT = 500, LONG = 15000; // see python_run.py

// `runs` is how often a model without an optimizer is run, at least, if it doesn't take long.
export async function runFolder(ort, Trainer, read, how, runs = 6) {
  const began = performance.now();
  const trainer = await Trainer.open(ort, read, 'model.json', how);
  const loaded = performance.now();
  const batch = {};
  const { buffer } = await read('batch.bin');
  for (const [name, { type, array, dims, offset, size }] of Object.entries(JSON.parse(text(await read('batch.json')))))
    batch[name] = new ort.Tensor(type, new globalThis[array](buffer, offset, size), dims);
  let found = {};
  const steps = [];
  const timed = async (work) => {
    const start = performance.now();
    const result = await work();
    steps.push(performance.now() - start);
    return result;
  };
  if (trainer.roles.learning_rate) {
    const losses = [];
    for (let step = 0; step < STEPS; step++) losses.push(await timed(() => trainer.step(batch, RATE)));
    const type = trainer.roles.outputs[trainer.roles.loss].type;
    const Losses = type === 'float64' ? Float64Array : Float32Array;
    found = { losses: { type: Losses === Float64Array ? 'float64' : 'float32', data: Losses.from(losses), dims: [STEPS] } };
    Object.assign(found, trainer.held);
  } else {
    do found = await timed(() => trainer.session.run({ ...trainer.held, ...batch }));
    while (runs > 1 && (steps.length < 2 || performance.now() < loaded + (steps.length < runs ? LONG : SHORT)));
  }
  return { ...packed(found), times: { load: loaded - began, step: median(steps.slice(steps.length > 1 ? 1 : 0)) } };
}

const median = (times) => times.sort((a, b) => a - b)[times.length >> 1];
const text = (bytes) => new TextDecoder().decode(bytes);

function packed(found) {
  const said = {}, parts = [];
  let end = 0;
  for (const [name, { type, data, dims }] of Object.entries(found)) {
    const offset = Math.ceil(end / 8) * 8;
    said[name] = { type, dims, size: data.length, offset };
    parts.push([offset, new Uint8Array(data.buffer, data.byteOffset, data.byteLength)]);
    end = offset + data.byteLength;
  }
  const bytes = new Uint8Array(end);
  for (const [offset, part] of parts) bytes.set(part, offset);
  return { said, data: bytes };
}
