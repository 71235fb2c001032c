// node train.mjs DIR: trains the model in a folder of `onnxgrad pack`, and writes DIR/trained.bin.
import { readFileSync, writeFileSync } from 'node:fs';
import { pathToFileURL } from 'node:url';
import ort from 'onnxruntime-node';

const folder = process.argv[2], SIZE = 32, STEPS = 1000;
const read = async (name) => new Uint8Array(readFileSync(`${folder}/${name}`));
const { Trainer } = await import(pathToFileURL(`${folder}/trainer.mjs`));
const trainer = await Trainer.open(ort, read, 'model.json');
const data = JSON.parse(readFileSync(`${folder}/data.json`)).train, { buffer } = await read('data.bin');

function batch(numbers) { // the samples of these numbers, as a tensor for each input
  const tensor = ([name, { array, dims, offset, size }]) => {
    const samples = new globalThis[array](buffer, offset, size), row = size / dims[0];
    const taken = numbers.flatMap((number) => [...samples.subarray(number * row, (number + 1) * row)]);
    return [name, trainer.tensor(name, taken, [numbers.length, ...dims.slice(1)])];
  };
  return Object.fromEntries(Object.entries(data).map(tensor));
}

for (let step = 1; step <= STEPS; step++) {
  const count = Object.values(data)[0].dims[0];
  const loss = await trainer.step(batch(Array.from({ length: SIZE }, () => Math.floor(Math.random() * count))), 0.005);
  if (step % 100 === 0) console.log(`step ${step}: loss ${loss.toFixed(3)}`);
}
writeFileSync(`${folder}/trained.bin`, trainer.save());
