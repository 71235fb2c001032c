// node run.mjs ORT TRAINER FOLDER...: runs the training model in each folder, and writes its results beside it.
import { readFileSync, writeFileSync } from 'node:fs';
import { pathToFileURL } from 'node:url';

const [, , ort_path, trainer_path, ...folders] = process.argv;
const ort = (await import(pathToFileURL(ort_path).href)).default;
const { Trainer } = await import(pathToFileURL(trainer_path).href);
const { runFolder } = await import('./folder.mjs');

for (const folder of folders) {
  const read = async (name) => new Uint8Array(readFileSync(`${folder}/${name}`));
  const how = { intraOpNumThreads: 1, interOpNumThreads: 1 };
  const { said, data, times } = await runFolder(ort, Trainer, read, how);
  writeFileSync(`${folder}/found.json`, JSON.stringify(said));
  writeFileSync(`${folder}/found.bin`, data);
  writeFileSync(`${folder}/times.json`, JSON.stringify(times));
}
