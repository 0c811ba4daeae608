// Opens a page in headless Chromium, light and dark, wide and as on a phone; prints one JSON document of what it found.
// node tests/browser/look.mjs FOLDER PAGE, where FOLDER holds what .ci/browser installs.
import { createRequire } from "node:module";
import { resolve } from "node:path";

const [folder, path] = process.argv.slice(2).map((name) => resolve(name));
const require = createRequire(`${folder}/`);
const { default: chromium } = await import(require.resolve("@sparticuz/chromium"));
const { default: puppeteer } = await import(require.resolve("puppeteer-core"));

const browser = await puppeteer.launch({
  executablePath: await chromium.executablePath(),
  args: ["--no-sandbox", "--single-process", "--no-zygote", "--disable-gpu", "--disable-dev-shm-usage"],
  headless: "shell",
});

async function looked(scheme, width) {
  const page = await browser.newPage();
  const requests = [];
  page.on("request", (request) => requests.push(request.url()));
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
  await page.setViewport({ width, height: 844 });
  await page.goto(`file://${path}`);
  const toggled = await opensByKeyboard(page);
  await page.addScriptTag({ path: require.resolve("axe-core") });
  const found = await page.evaluate(async () => {
    document.querySelectorAll("details").forEach((one) => (one.open = true));
    const { violations, passes } = await axe.run();
    return {
      violations: violations.map((one) => `${one.id}: ${one.nodes.map((node) => node.target).join(", ")}`),
      num_passes: passes.length,
      width: innerWidth,
      scroll_width: document.documentElement.scrollWidth,
      background: getComputedStyle(document.body).backgroundColor,
      colours: Object.fromEntries(
        ["page", "ink", "soft", "link", "warn", "warn-ink", "first", "second", "third"].map((name) => [
          name,
          getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(),
        ]),
      ),
      smallest_text: Math.min(
        ...[...document.querySelectorAll("svg text")].map((text) => text.getBoundingClientRect().height),
      ),
      headings: [...document.querySelectorAll("h1, h2, h3, h4")].map((one) => Number(one.tagName[1])),
      identifiers: [...document.querySelectorAll("[id]")].map((one) => one.id),
    };
  });
  await page.close();
  return { scheme, ...found, toggled, requests };
}

async function opensByKeyboard(page) {
  for (let presses = 0; presses < 20; presses += 1) {
    await page.keyboard.press("Tab");
    if (await page.evaluate(() => document.activeElement.tagName === "SUMMARY")) {
      await page.keyboard.press("Enter");
      return page.evaluate(() => document.activeElement.parentElement.open);
    }
  }
  return false;
}

const views = [];
for (const scheme of ["light", "dark"]) {
  for (const width of [1300, 390]) {
    views.push(await looked(scheme, width));
  }
}
await browser.close();
console.log(JSON.stringify(views));
