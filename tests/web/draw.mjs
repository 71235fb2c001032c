// node draw.mjs PACKAGES CHROMIUM SITE OUT: draws a one with the mouse and a minus with the keyboard, which is to be a 7;
// trains and saves; prints what the page tells before and after, and leaves a screenshot of each.
import { createRequire } from 'node:module';
import { serve, visit } from './serve.mjs';

const [, , packages, executable, site, out] = process.argv;
const { chromium } = createRequire(`${packages}/`)('playwright-core');
const server = await serve({ '': site });
try {
  await visit(chromium, executable, false, async (page) => {
    await page.setViewportSize({ width: 400, height: 800 });
    await page.goto(`${server.url}/draw.html`);
    const ready = () => page.waitForSelector('#train:not([disabled])', { timeout: 240000 });
    await ready();
    if (await page.evaluate(() => document.documentElement.scrollWidth > innerWidth)) throw new Error('too wide');
    await page.click('#add');
    await page.waitForFunction(() => document.getElementById('now').textContent === 'Draw a digit first.');
    await ready();
    const { x, y, width, height } = await page.locator('#pad').boundingBox();
    await page.mouse.move(x + width / 2, y + height / 16);
    await page.mouse.down();
    await page.mouse.move(x + width / 2, y + (15 * height) / 16, { steps: 20 });
    await page.mouse.up();
    await page.screenshot({ path: `${out}/drawn.png` });
    await page.fill('#digit', '1');
    await page.click('#add');
    await ready();
    await page.focus('#pad');
    for (const key of ['ArrowDown', 'ArrowDown', 'ArrowDown', ' ', 'ArrowLeft', ' ', 'ArrowLeft', ' ']) await page.keyboard.press(key);
    await page.fill('#digit', '7');
    await page.keyboard.press('Enter');
    await ready();
    console.log(await page.textContent('#now'));
    await page.click('#train');
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
