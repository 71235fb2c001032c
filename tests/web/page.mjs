// node page.mjs PACKAGES CHROMIUM SITE OUT: visits the page of a packed folder, trains, saves; prints what it tells
// before and after, and leaves a screenshot of each, at the width of a telephone.
import { createRequire } from 'node:module';
import { serve, visit } from './serve.mjs';

const [, , packages, executable, site, out] = process.argv;
const { chromium } = createRequire(`${packages}/`)('playwright-core');
const server = await serve({ '': site });
try {
  await visit(chromium, executable, false, async (page) => {
    await page.setViewportSize({ width: 400, height: 700 });
    await page.goto(`${server.url}/index.html`);
    const ready = () => page.waitForSelector('#train:not([disabled])', { timeout: 240000 });
    await ready();
    console.log(await page.textContent('#now'));
    await page.screenshot({ path: `${out}/before.png` });
    if (await page.evaluate(() => document.documentElement.scrollWidth > innerWidth)) throw new Error('too wide');
    await page.fill('#steps', '800');
    await page.focus('#rate');
    await page.keyboard.press('Enter'); // no mouse is needed
    await page.waitForSelector('#train[disabled]');
    await ready();
    console.log(await page.textContent('#now'));
    await page.screenshot({ path: `${out}/after.png` });
    const [saved] = await Promise.all([page.waitForEvent('download'), page.click('#save')]);
    await saved.saveAs(`${out}/trained.bin`);
  });
} finally {
  server.close();
}
