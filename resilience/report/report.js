(()=>{
addEventListener('beforeprint',()=>document.querySelectorAll('details').forEach(d=>{d.open=true}));
const open=()=>{const d=document.getElementById(location.hash.slice(1));if(d&&d.tagName==='DETAILS')d.open=true};
addEventListener('hashchange',open);open();
document.querySelectorAll('.logs').forEach(d=>{const l=d.querySelector('label'),i=l.querySelector('input'),rows=[...d.querySelectorAll('.lines div')];
l.hidden=false;i.oninput=()=>{const t=i.value.toLowerCase();let n=0;rows.forEach(r=>{r.hidden=!r.textContent.toLowerCase().includes(t);n+=!r.hidden});
l.querySelector('output').textContent=t?n+' of '+rows.length:''}});
const chart=document.getElementById('lanes'),bars=document.getElementById('bars'),say=document.getElementById('say');
if(!chart)return;
const full=bars.viewBox.baseVal.width,height=bars.viewBox.baseVal.height,span=+chart.dataset.span;
const ticks=[...chart.querySelectorAll('.tick')],lanes=[...bars.querySelectorAll('g')];
let x=0,w=full,chosen=-1;
const time=s=>s>=3600?Math.floor(s/3600)+' h '+Math.floor(s%3600/60)+' min':s>=100?Math.floor(s/60)+' min '+Math.round(s%60)+' s':
s>=1?s.toFixed(w<full/50?3:1)+' s':Math.round(s*1000)+' ms';
const show=()=>{x=Math.min(full-w,Math.max(0,x));bars.setAttribute('viewBox',x+' 0 '+w+' '+height);
ticks.forEach((t,i)=>{t.textContent=time((x+w*i/(ticks.length-1))/full*span)})};
const zoom=(f,at)=>{const c=x+w*at;w=Math.min(full,Math.max(full/2000,w*f));x=c-w*at;show()};
const choose=d=>{if(chosen>=0)lanes[chosen].classList.remove('chosen');chosen=Math.min(lanes.length-1,Math.max(0,chosen+d));
lanes[chosen].classList.add('chosen');say.hidden=false;say.textContent=lanes[chosen].dataset.say};
const tools={'+':()=>zoom(.5,.5),'=':()=>zoom(.5,.5),'-':()=>zoom(2,.5),ArrowLeft:()=>{x-=w/5;show()},ArrowRight:()=>{x+=w/5;show()},
ArrowUp:()=>choose(-1),ArrowDown:()=>choose(1),Home:()=>{x=0;w=full;show()}};
document.querySelectorAll('[data-key]').forEach(b=>{b.hidden=false;b.onclick=()=>tools[b.dataset.key]()});
chart.onkeydown=e=>{const t=tools[e.key];if(t&&!e.ctrlKey&&!e.metaKey){t();e.preventDefault()}};
const place=e=>{const r=bars.getBoundingClientRect();return Math.min(1,Math.max(0,(e.clientX-r.left)/r.width))};
chart.addEventListener('wheel',e=>{if(e.ctrlKey){zoom(e.deltaY<0?.7:1.4,place(e));e.preventDefault()}},{passive:false});
let from=null;
chart.onpointerdown=e=>{from=[place(e),x]};
addEventListener('pointermove',e=>{if(from&&w<full&&e.pointerType==='mouse'){x=from[1]-(place(e)-from[0])*w;show()}});
addEventListener('pointerup',()=>{from=null});
chart.addEventListener('mouseover',e=>{const t=e.target.querySelector&&e.target.querySelector(':scope>title');
if(t){say.hidden=false;say.textContent=t.textContent}});
})();
