// node chromium.mjs PACKAGES CHROMIUM TRAINER_FOLDER wasm|webgpu FOLDER...: as run.mjs, in Chromium; a model that does
// not run leaves refused.txt, and so does one that is not done in the minutes of ONNXGRAD_MINUTES.
// ONNXGRAD_RUNS is how often each is run, 6 times by default.
import { writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { dirname } from 'node:path';
import { fileURLToPath } from 'node:url';
import { serve, visit } from './serve.mjs';

const [, , packages, executable, trainer, provider, ...folders] = process.argv;
const minutes = Number(process.env.ONNXGRAD_MINUTES ?? 10);
const runs = Number(process.env.ONNXGRAD_RUNS ?? 6);
const { chromium } = createRequire(`${packages}/`)('playwright-core');
const places = Object.fromEntries(folders.map((folder, i) => [`f${i}`, folder]));
const server = await serve({ ort: `${packages}/onnxruntime-web/dist`, trainer, tests: dirname(fileURLToPath(import.meta.url)), ...places });

async function inPage({ url, provider, folder, runs }) {
  const ort = await import(`${url}/ort/ort.${provider === 'webgpu' ? 'webgpu' : 'wasm'}.min.mjs`);
  ort.env.wasm.wasmPaths = `${url}/ort/`;
  ort.env.wasm.numThreads = 1;
  ort.env.logLevel = 'error';
  const { Trainer } = await import(`${url}/trainer/trainer.mjs`);
  const { runFolder } = await import(`${url}/tests/folder.mjs`);
  const read = async (name) => new Uint8Array(await (await fetch(`${url}/${folder}/${name}`)).arrayBuffer());
  const { said, data, times } = await runFolder(ort, Trainer, read, { executionProviders: [provider] }, runs);
  let text = '';
  for (let i = 0; i < data.length; i += 32768) text += String.fromCharCode(...data.subarray(i, i + 32768));
  return { said, data: btoa(text), times };
}

async function late(minutes) {
  await new Promise((done) => setTimeout(done, minutes * 60000).unref());
  throw new Error(`not done in ${minutes} minutes`);
}

try {
  for (const [i, folder] of folders.entries())
    await visit(chromium, executable, provider === 'webgpu', async (page) => {
      await page.goto(`${server.url}/tests/empty.html`);
      try {
        const work = page.evaluate(inPage, { url: server.url, provider, folder: `f${i}`, runs });
        work.catch(() => {}); // it may fail later still
        const { said, data, times } = await Promise.race([work, late(minutes)]);
        writeFileSync(`${folder}/found.json`, JSON.stringify(said));
        writeFileSync(`${folder}/found.bin`, Buffer.from(data, 'base64'));
        writeFileSync(`${folder}/times.json`, JSON.stringify(times));
      } catch (error) {
        writeFileSync(`${folder}/refused.txt`, String(error));
      }
    });
} finally {
  server.close();
}
