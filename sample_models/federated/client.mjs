// node client.mjs DIR WEIGHTS.bin UPDATE.bin STEPS SIZE RATE: what training changes in weights, on the samples in a folder
// of `onnxgrad pack`. A page imports `update` and `batches`, and hands over what it has fetched.

// What a step on each batch changes in weights and running statistics; zeros for the optimizer's own state.
export async function update(trainer, weights, batches, rate) {
  const { roles } = trainer;
  if (weights.length !== roles.stored && weights.length !== roles.bytes)
    throw new Error(`${weights.length} bytes are not the ${roles.bytes} of '${roles.model}'`);
  const start = new Uint8Array(roles.bytes), found = new Uint8Array(roles.bytes);
  start.set(weights); // what the file of the start leaves out is zero
  trainer.load(start);
  for (const batch of batches) await trainer.step(batch, rate);
  const trained = trainer.save();
  for (const [name, { slot, type, array, offset, size }] of Object.entries(roles.inputs)) {
    if (offset === undefined || slot !== undefined) continue;
    if (!['float32', 'float64'].includes(type)) throw new Error(`'${name}' is neither float32 nor float64`);
    const [before, after, into] = [start, trained, found].map(({ buffer }) => new globalThis[array](buffer, offset, size));
    after.forEach((number, i) => (into[i] = number - before[i]));
    if (!into.every(Number.isFinite)) throw new Error(`'${name}' is not finite after training: there is no update`);
  }
  return found;
}

// Batches of the samples in their order, from the first again after the last; `data` and `bytes` are pack's data files.
export function* batches(trainer, data, bytes, steps, size) {
  if (!(steps > 0 && size > 0)) throw new Error(`${steps} steps on ${size} samples each`);
  for (let step = 0; step < steps; step++)
    yield Object.fromEntries(Object.entries(data).map(([name, { array, dims, offset, size: length }]) => {
      const samples = new globalThis[array](bytes.buffer, offset, length), row = length / dims[0];
      const taken = new globalThis[array](size * row);
      for (let i = 0, number = step * size; i < size; i++, number++)
        taken.set(samples.subarray((number % dims[0]) * row, ((number % dims[0]) + 1) * row), i * row);
      return [name, trainer.tensor(name, taken, [size, ...dims.slice(1)])];
    }));
}

if (globalThis.process?.argv[1]?.endsWith('client.mjs')) {
  const [folder, weights, out, steps, size, rate] = process.argv.slice(2);
  const { readFileSync, writeFileSync } = await import('node:fs');
  const { default: ort } = await import('onnxruntime-node');
  const { Trainer } = await import((await import('node:url')).pathToFileURL(`${folder}/trainer.mjs`));
  const read = async (name) => new Uint8Array(readFileSync(`${folder}/${name}`));
  const trainer = await Trainer.open(ort, read, 'model.json');
  const { train } = JSON.parse(readFileSync(`${folder}/data.json`));
  const taken = batches(trainer, train, await read('data.bin'), +steps, +size);
  writeFileSync(out, await update(trainer, new Uint8Array(readFileSync(weights)), taken, +rate));
}
