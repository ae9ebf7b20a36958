"""The report's style sheet: one column on a phone, cards on a desk, light and dark by the reader's
preference.
"""

_COLOURS = ("blue", "aqua", "amber", "violet", "orange", "magenta", "green", "grey")
LIGHT = ("#2a78d6", "#1a9e72", "#c98a00", "#5b48b8", "#d9572b", "#cf5f92", "#3b7f1f", "#8a8f98")
DARK = ("#5a9dee", "#2fb98a", "#d9a12e", "#a497ea", "#ec7a4e", "#e386ad", "#74b553", "#80868f")


def style_sheet() -> str:
    """The content of the page's only ``<style>``."""
    light = "".join(f"--c{n}:{value};" for n, value in enumerate(LIGHT, 1))
    dark = "".join(f"--c{n}:{value};" for n, value in enumerate(DARK, 1))
    classes = "".join(
        f".fill-{n}{{fill:var(--c{n})}}.stroke-{n}{{stroke:var(--c{n})}}.line-{n}{{stroke:var(--c{n})}}.bg-{n}{{background:var(--c{n})}}"
        for n in range(1, len(_COLOURS) + 1)
    )
    return _SHEET.replace("/*LIGHT*/", light).replace("/*DARK*/", dark) + classes


_SHEET = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#14171c;--soft:#5c6470;--rule:#e3e6eb;--grid:#eceef2;
--good:#12805c;--bad:#c62f2f;--warn:#a46a00;--good-bg:#e5f5ee;--bad-bg:#fdeaea;--warn-bg:#fcf2dd;--plain-bg:#eceff4;/*LIGHT*/}
@media(prefers-color-scheme:dark){:root{--page:#101216;--card:#191c22;--ink:#eceef2;--soft:#9aa3b0;--rule:#2b3039;--grid:#262b33;
--good:#46c797;--bad:#f27b78;--warn:#e0ac4b;--good-bg:#123327;--bad-bg:#40191b;--warn-bg:#3a2c10;--plain-bg:#262b33;/*DARK*/}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;
-webkit-text-size-adjust:100%}
main{max-width:1120px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:32px;line-height:1.15;margin:2px 0 6px;letter-spacing:-.02em;overflow-wrap:anywhere}
h2{font-size:20px;line-height:1.3;margin:44px 0 2px;letter-spacing:-.01em}
h3{font-size:14px;line-height:1.35;margin:0 0 6px;font-weight:600}
p{margin:0 0 12px;max-width:76ch}
.lead{color:var(--soft);margin-bottom:14px}
.eyebrow{color:var(--soft);font-size:13px;display:flex;gap:10px;align-items:center;flex-wrap:wrap}
.pill{border-radius:99px;padding:1px 10px;font-size:12.5px;font-weight:600;background:var(--plain-bg);color:var(--soft)}
.pill.good{background:var(--good-bg);color:var(--good)}.pill.bad{background:var(--bad-bg);color:var(--bad)}
.pill.warn{background:var(--warn-bg);color:var(--warn)}
.banner{border-radius:10px;padding:12px 16px;margin:18px 0 0;background:var(--warn-bg);overflow-wrap:anywhere}
.banner.bad{background:var(--bad-bg)}.banner strong{color:var(--bad)}.banner p{margin:2px 0 0}
.card{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:16px 18px;min-width:0}
.gap{height:16px}
.cards{display:grid;gap:16px;grid-template-columns:repeat(auto-fill,minmax(min(100%,400px),1fr))}
.small{grid-template-columns:repeat(auto-fill,minmax(min(100%,300px),1fr))}
.hero{display:grid;grid-template-columns:minmax(0,1.7fr) minmax(0,1fr);gap:16px;margin-top:22px}
.result{display:flex;gap:18px 26px;align-items:flex-end;flex-wrap:wrap}
.result .arrow{font-size:28px;color:var(--soft);padding-bottom:20px}
.big{font-size:40px;line-height:1.1;font-weight:650;letter-spacing:-.02em;font-variant-numeric:tabular-nums;white-space:nowrap}
.label{color:var(--soft);font-size:13px}
.gain{margin-top:14px;padding-top:12px;border-top:1px solid var(--rule);max-width:none}
.gain b{font-size:17px;font-variant-numeric:tabular-nums}.up{color:var(--good)}.down{color:var(--bad)}
.facts{display:grid;grid-template-columns:1fr 1fr;gap:12px 18px;align-content:center}
.facts b{display:block;font-size:19px;font-weight:620;line-height:1.3;font-variant-numeric:tabular-nums}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px;color:var(--soft);margin:0 0 6px;padding:0;list-style:none}
.legend b{color:var(--ink);font-weight:600;font-variant-numeric:tabular-nums;margin-left:4px}
.swatch{display:inline-block;width:14px;height:3px;border-radius:2px;margin-right:6px;vertical-align:middle}
.swatch.block{height:10px;width:10px}.swatch.dash{background-image:linear-gradient(90deg,var(--card) 3px,transparent 3px);background-size:6px}
.swatch.tall{height:12px;width:2px;background:var(--ink)}
.note{font-size:13px;color:var(--soft);margin:8px 0 0}
.none{color:var(--soft);margin:0}
svg.chart{display:block;width:100%;height:auto;overflow:visible}
.tick{fill:var(--soft);font-size:10px;font-variant-numeric:tabular-nums}.grid{stroke:var(--grid)}.axis{stroke:var(--rule)}
polyline{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}.dashed{stroke-dasharray:3 4}
.band{opacity:.16}.error{stroke-width:1.2;opacity:.7}.dot.far{opacity:0}.dot:hover{opacity:1;stroke:var(--ink);stroke-width:1}
.diagonal{stroke:var(--soft);stroke-dasharray:3 4;opacity:.7}.point{opacity:.75}.point:hover{opacity:1;stroke:var(--ink)}
.whole{stroke:var(--ink);stroke-width:1.4}
.pictures{display:grid;gap:16px;grid-template-columns:repeat(auto-fill,minmax(min(100%,330px),1fr))}
figure.card{margin:0;display:flex;flex-direction:column;justify-content:space-between}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:14px}
.pair .label{display:flex;justify-content:space-between;margin-bottom:4px}
.pair .label b{color:var(--ink);font-variant-numeric:tabular-nums}
.sheet{display:grid;gap:4px}.sheet.of-1{grid-template-columns:1fr}.sheet.of-2{grid-template-columns:1fr 1fr}
.sheet.of-3{grid-template-columns:repeat(3,1fr)}
.sheet img,.sheet .hole{display:block;width:100%;height:auto;aspect-ratio:1;border-radius:3px;background:var(--plain-bg)}
.tiny{image-rendering:pixelated}
.caption{font-weight:600;margin:0 0 8px;overflow-wrap:anywhere;line-height:1.35}
.scroll{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:13.5px;width:100%;font-variant-numeric:tabular-nums}
th{font-weight:600;text-align:left;color:var(--soft);font-size:12.5px}
th,td{padding:5px 12px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top}
tr:last-child td{border-bottom:0}td.n,th.n{text-align:right;white-space:nowrap}td:last-child,th:last-child{padding-right:0}
td.wide{overflow-wrap:anywhere;min-width:12em}td.when,td.who{white-space:nowrap}
.bar{display:inline-block;height:8px;border-radius:2px;vertical-align:middle;margin-right:8px}
.good-ink{color:var(--good)}.bad-ink{color:var(--bad)}.warn-ink{color:var(--warn)}
.lanes{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:5px 14px;align-items:center;font-size:13px}
.track{position:relative;height:20px}.life{position:absolute;top:7px;height:6px;border-radius:3px;background:var(--c1);opacity:.42;min-width:2px}
.mark{position:absolute;top:3px;width:14px;height:14px;margin-left:-7px;border-radius:50%;border:2px solid var(--card);
background:var(--soft);z-index:1}
.mark.good{background:var(--good)}.mark.bad{background:var(--bad);border-radius:3px;z-index:3}
.mark.warn{background:var(--warn);width:10px;height:10px;top:5px;margin-left:-5px;z-index:2}
.mark.tickmark{width:2px;margin-left:-1px;border:0;border-radius:1px;height:12px;top:4px;background:var(--soft);opacity:.75}
.timeline{gap:0 14px}.timeline .track{height:22px}.timeline .life{top:3px;height:16px;border-radius:2px}
.life.quiet{background:var(--rule);opacity:1}svg.work{position:absolute;left:0;top:0;width:100%;height:100%;z-index:0;overflow:visible}
svg.work rect{transform:scaleY(.56);transform-origin:0 50%;transform-box:view-box}svg.work rect:hover{opacity:.7}
.version{stroke:var(--soft);stroke-width:1;opacity:.55;vector-effect:non-scaling-stroke;fill:none}
.lost{fill:var(--bad);background:var(--bad)}
.track.ticks{height:16px;color:var(--soft);font-size:11px}.track.ticks span{position:absolute;top:0;transform:translateX(-50%)}
.track.ticks span.last{transform:translateX(-100%)}
.track.ruler{height:18px;border-top:1px solid var(--rule);color:var(--soft);font-size:12px}
.track.ruler span{position:absolute;top:2px;transform:translateX(-50%);white-space:nowrap}
.track.ruler span:first-child{transform:none}.track.ruler span:last-child{transform:translateX(-100%)}
details{margin-top:14px}details.card{padding:0}details.card>summary{padding:12px 18px}details.card>div{padding:0 18px 16px}
summary{cursor:pointer;font-weight:600}summary:focus-visible{outline:2px solid var(--c1);outline-offset:2px}
code,pre{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere}
footer{margin-top:44px;color:var(--soft);font-size:13px}
@media(max-width:699px){main{padding:20px 14px 48px}h1{font-size:26px}h2{margin-top:34px}.hero{grid-template-columns:minmax(0,1fr)}
.big{font-size:31px}.result{gap:8px;flex-wrap:nowrap;justify-content:space-between;align-items:flex-start}.result .arrow{font-size:22px;padding:22px 0 0}
.result .label{font-size:12px}.card{padding:14px}.tick{font-size:12px}
.lanes{grid-template-columns:minmax(0,1fr);gap:0}.lanes>.who{margin-top:6px;color:var(--soft)}.timeline .track{margin-bottom:2px}.facts{gap:10px}
.events thead{display:none}.events tr{display:block;padding:7px 0;border-bottom:1px solid var(--rule)}.events tr:last-child{border-bottom:0}
.events td{display:inline;border:0;padding-right:6px}.events td.wide{display:block;color:var(--soft);font-size:13px;padding:2px 0 0}
th,td{padding-right:8px}.hide-small{display:none}}
@media print{body{background:#fff}.card{break-inside:avoid}}
"""
