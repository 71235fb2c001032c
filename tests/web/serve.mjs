// A server of static files, with the headers that threads of wasm want, and Chromium to visit it.
import { createReadStream, existsSync, mkdtempSync, rmSync } from 'node:fs';
import { createServer } from 'node:http';
import { tmpdir } from 'node:os';
import { extname, join, normalize } from 'node:path';

const TYPES = { '.html': 'text/html', '.js': 'text/javascript', '.mjs': 'text/javascript', '.wasm': 'application/wasm',
  '.json': 'application/json', '.css': 'text/css' };

// Serves folders by the first part of the path: { ort: '/.../dist' }.
export async function serve(folders) {
  const server = createServer((request, response) => {
    const path = normalize(decodeURIComponent(new URL(request.url, 'http://x').pathname)).slice(1);
    const [first, ...rest] = path.split('/');
    const file = join(folders[first] ?? '/nowhere', ...rest);
    if (path.includes('..') || !existsSync(file)) return void response.writeHead(404).end();
    response.writeHead(200, {
      'Content-Type': TYPES[extname(file)] ?? 'application/octet-stream',
      'Cross-Origin-Opener-Policy': 'same-origin',
      'Cross-Origin-Embedder-Policy': 'require-corp',
    });
    createReadStream(file).pipe(response);
  });
  await new Promise((ready) => server.listen(0, '127.0.0.1', ready));
  return { url: `http://127.0.0.1:${server.address().port}`, close: () => server.close() };
}

const PLAIN = ['--no-sandbox', '--disable-quic', '--no-first-run', '--disable-background-networking',
  '--disable-component-update', '--disable-sync'];
const WEBGPU = ['--enable-unsafe-webgpu', '--use-webgpu-adapter=swiftshader', '--enable-features=Vulkan'];

// A page in Chromium, with WebGPU by software where asked for; what the page says and its errors go to `tell`.
export async function visit(chromium, executablePath, webgpu, work, tell = console.error) {
  const folder = mkdtempSync(join(tmpdir(), 'chromium-'));
  const args = [...PLAIN, ...(webgpu ? WEBGPU : ['--disable-gpu'])];
  const context = await chromium.launchPersistentContext(folder, { executablePath, headless: true, args });
  try {
    const page = await context.newPage();
    page.on('pageerror', (error) => tell(String(error)));
    page.on('console', (message) => message.type() === 'error' && tell(message.text()));
    return await work(page);
  } finally {
    await context.close();
    rmSync(folder, { recursive: true, force: true });
  }
}
