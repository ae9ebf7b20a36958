(() => {
const page = document.body.dataset, key = "sol-rl" + location.pathname, folds = () => [...document.querySelectorAll("details")];
const late = () => {
const age = Date.now() / 1000 - page.written, note = document.getElementById("late");
note.hidden = age < page.late;
if (!note.hidden) Object.assign(document.querySelector(".pill"), {textContent: "no end recorded", className: "pill warn"});
document.getElementById("age").textContent = Math.round(age / 60) + " minutes";
};
try {
const kept = JSON.parse(sessionStorage.getItem(key));
if (kept) {
history.scrollRestoration = "manual";
folds().forEach((fold, at) => fold.open = kept.open.includes(fold.querySelector("summary").textContent));
scrollTo(0, kept.top);
}
} catch {}
late();
setTimeout(() => {
const open = folds().filter(fold => fold.open).map(fold => fold.querySelector("summary").textContent);
try { sessionStorage.setItem(key, JSON.stringify({top: scrollY, open})); } catch {}
location.reload();
}, page.reload * 1000);
})();
