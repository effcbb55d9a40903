(()=>{const s=document.getElementById('lanes');if(!s)return;const full=s.viewBox.baseVal.width,h=s.viewBox.baseVal.height;
let x=0,w=full;const show=()=>s.setAttribute('viewBox',x+' 0 '+w+' '+h);
const zoom=f=>{const c=x+w/2;w=Math.min(full,Math.max(full/200,w*f));x=Math.min(full-w,Math.max(0,c-w/2));show()};
const move=d=>{x=Math.min(full-w,Math.max(0,x+d*w));show()};
const tools={'+':()=>zoom(.5),'-':()=>zoom(2),ArrowLeft:()=>move(-.2),ArrowRight:()=>move(.2),Home:()=>{x=0;w=full;show()}};
document.querySelectorAll('[data-key]').forEach(b=>{b.hidden=false;b.onclick=()=>tools[b.dataset.key]()});
s.tabIndex=0;s.onkeydown=e=>{const t=tools[e.key];if(t){t();e.preventDefault()}};})();
